"""Checkpoints on a medium: segment files, markers, the log, the commit protocol and the backends below it.

`FORMAT.md` beside the package describes every byte.
"""

from lightning_moe_ckpt.storage._backend import Backend as Backend
from lightning_moe_ckpt.storage._backend import Entry as Entry
from lightning_moe_ckpt.storage._backend import create_once as create_once
from lightning_moe_ckpt.storage._backend import open_backend as open_backend
from lightning_moe_ckpt.storage._backend import wrapping_backends as wrapping_backends
from lightning_moe_ckpt.storage._carry import BadCopies as BadCopies
from lightning_moe_ckpt.storage._carry import carry_forward as carry_forward
from lightning_moe_ckpt.storage._carry import carry_spares as carry_spares
from lightning_moe_ckpt.storage._carry import full_records as full_records
from lightning_moe_ckpt.storage._checks import check_places as check_places
from lightning_moe_ckpt.storage._checks import verify_records as verify_records
from lightning_moe_ckpt.storage._digest import DIGEST_NAME as DIGEST_NAME
from lightning_moe_ckpt.storage._digest import digest_of as digest_of
from lightning_moe_ckpt.storage._entries import BorrowedEntry as BorrowedEntry
from lightning_moe_ckpt.storage._entries import OverflowEntry as OverflowEntry
from lightning_moe_ckpt.storage._entries import SegmentEntry as SegmentEntry
from lightning_moe_ckpt.storage._fsspec import FsspecBackend as FsspecBackend
from lightning_moe_ckpt.storage._garbage import Garbage as Garbage
from lightning_moe_ckpt.storage._garbage import JudgedGeneration as JudgedGeneration
from lightning_moe_ckpt.storage._garbage import collect_garbage as collect_garbage
from lightning_moe_ckpt.storage._memory import RING_HEADER_NBYTES as RING_HEADER_NBYTES
from lightning_moe_ckpt.storage._memory import MemoryMarker as MemoryMarker
from lightning_moe_ckpt.storage._memory import RingHeader as RingHeader
from lightning_moe_ckpt.storage._module import HuggingFaceEntry as HuggingFaceEntry
from lightning_moe_ckpt.storage._module import ModuleEntry as ModuleEntry
from lightning_moe_ckpt.storage._module import ModuleLine as ModuleLine
from lightning_moe_ckpt.storage._names import GenerationId as GenerationId
from lightning_moe_ckpt.storage._names import segment_key as segment_key
from lightning_moe_ckpt.storage._nested import PERSISTED_HEADER as PERSISTED_HEADER
from lightning_moe_ckpt.storage._nested import NestedLayout as NestedLayout
from lightning_moe_ckpt.storage._object import ObjectBackend as ObjectBackend
from lightning_moe_ckpt.storage._posix import PosixBackend as PosixBackend
from lightning_moe_ckpt.storage._ranges import read_chunks as read_chunks
from lightning_moe_ckpt.storage._record_table import RecordEntry as RecordEntry
from lightning_moe_ckpt.storage._record_table import RecordRows as RecordRows
from lightning_moe_ckpt.storage._records import Commit as Commit
from lightning_moe_ckpt.storage._records import RankMarker as RankMarker
from lightning_moe_ckpt.storage._retention import Retention as Retention
from lightning_moe_ckpt.storage._retry import Retrying as Retrying
from lightning_moe_ckpt.storage._run import Resume as Resume
from lightning_moe_ckpt.storage._run import RunStore as RunStore
from lightning_moe_ckpt.storage._scrub import read_record as read_record
from lightning_moe_ckpt.storage._scrub import scrub_overflow as scrub_overflow
from lightning_moe_ckpt.storage._scrub import scrub_segment as scrub_segment
from lightning_moe_ckpt.storage._segment import SegmentLayout as SegmentLayout
from lightning_moe_ckpt.storage._segment import Span as Span
from lightning_moe_ckpt.storage._segment import TensorSpec as TensorSpec
from lightning_moe_ckpt.storage._segment import dtype_code as dtype_code
from lightning_moe_ckpt.storage._segment import dtype_of as dtype_of
from lightning_moe_ckpt.storage._url import checked_url as checked_url
from lightning_moe_ckpt.storage._view import RunView as RunView
from lightning_moe_ckpt.storage._view import StoredGeneration as StoredGeneration
