"""Checkpoints on a medium: segment files, markers, the log, the commit protocol and the backends below them.

`lightning_moe_ckpt/FORMAT.md` describes every byte.

Internal: may change in any version.
"""

from lightning_moe_ckpt.storage._backend import Backend as Backend
from lightning_moe_ckpt.storage._backend import Entry as Entry
from lightning_moe_ckpt.storage._backend import Pace as Pace
from lightning_moe_ckpt.storage._backend import create_once as create_once
from lightning_moe_ckpt.storage._catalog import CONSTANTS as CONSTANTS
from lightning_moe_ckpt.storage._catalog import read_constants as read_constants
from lightning_moe_ckpt.storage._entries import RecordColumns as RecordColumns
from lightning_moe_ckpt.storage._entries import RecordEntry as RecordEntry
from lightning_moe_ckpt.storage._entries import RecordRows as RecordRows
from lightning_moe_ckpt.storage._entries import ReferencedEntry as ReferencedEntry
from lightning_moe_ckpt.storage._entries import SegmentEntry as SegmentEntry
from lightning_moe_ckpt.storage._entries import SpelledRows as SpelledRows
from lightning_moe_ckpt.storage._fsspec import FsspecBackend as FsspecBackend
from lightning_moe_ckpt.storage._json import digest_of as digest_of
from lightning_moe_ckpt.storage._log import Lineage as Lineage
from lightning_moe_ckpt.storage._markers import BadCopies as BadCopies
from lightning_moe_ckpt.storage._markers import Commit as Commit
from lightning_moe_ckpt.storage._markers import HuggingFaceEntry as HuggingFaceEntry
from lightning_moe_ckpt.storage._markers import ModuleEntry as ModuleEntry
from lightning_moe_ckpt.storage._markers import ModuleLine as ModuleLine
from lightning_moe_ckpt.storage._markers import RankMarker as RankMarker
from lightning_moe_ckpt.storage._markers import carry_forward as carry_forward
from lightning_moe_ckpt.storage._markers import carry_spares as carry_spares
from lightning_moe_ckpt.storage._markers import full_records as full_records
from lightning_moe_ckpt.storage._memory_marker import RING_HEADER_NBYTES as RING_HEADER_NBYTES
from lightning_moe_ckpt.storage._memory_marker import ExpertSlot as ExpertSlot
from lightning_moe_ckpt.storage._memory_marker import MemoryMarker as MemoryMarker
from lightning_moe_ckpt.storage._memory_marker import RingHeader as RingHeader
from lightning_moe_ckpt.storage._memory_marker import SlotClass as SlotClass
from lightning_moe_ckpt.storage._memory_marker import lacking_memory as lacking_memory
from lightning_moe_ckpt.storage._names import MAX_MARKER_NBYTES as MAX_MARKER_NBYTES
from lightning_moe_ckpt.storage._names import GenerationId as GenerationId
from lightning_moe_ckpt.storage._names import segment_key as segment_key
from lightning_moe_ckpt.storage._object import ObjectBackend as ObjectBackend
from lightning_moe_ckpt.storage._open import Retrying as Retrying
from lightning_moe_ckpt.storage._open import checked_url as checked_url
from lightning_moe_ckpt.storage._open import open_backend as open_backend
from lightning_moe_ckpt.storage._open import wrapping_backends as wrapping_backends
from lightning_moe_ckpt.storage._posix import PosixBackend as PosixBackend
from lightning_moe_ckpt.storage._retention import Retention as Retention
from lightning_moe_ckpt.storage._run_store import Resume as Resume
from lightning_moe_ckpt.storage._run_store import RunStore as RunStore
from lightning_moe_ckpt.storage._scrub import check_header as check_header
from lightning_moe_ckpt.storage._scrub import check_places as check_places
from lightning_moe_ckpt.storage._scrub import scrub_record as scrub_record
from lightning_moe_ckpt.storage._scrub import scrub_segment as scrub_segment
from lightning_moe_ckpt.storage._segment import MAX_HEADER_NBYTES as MAX_HEADER_NBYTES
from lightning_moe_ckpt.storage._segment import SegmentLayout as SegmentLayout
from lightning_moe_ckpt.storage._segment import Span as Span
from lightning_moe_ckpt.storage._segment import TensorKind as TensorKind
from lightning_moe_ckpt.storage._segment import TensorSpec as TensorSpec
from lightning_moe_ckpt.storage._segment import dtype_code as dtype_code
from lightning_moe_ckpt.storage._segment import dtype_of as dtype_of
from lightning_moe_ckpt.storage._upkeep import Garbage as Garbage
from lightning_moe_ckpt.storage._upkeep import JudgedGeneration as JudgedGeneration
from lightning_moe_ckpt.storage._upkeep import RepairedLog as RepairedLog
from lightning_moe_ckpt.storage._upkeep import collect_garbage as collect_garbage
from lightning_moe_ckpt.storage._upkeep import repair_log as repair_log
from lightning_moe_ckpt.storage._view import RunView as RunView
from lightning_moe_ckpt.storage._view import StoredGeneration as StoredGeneration
