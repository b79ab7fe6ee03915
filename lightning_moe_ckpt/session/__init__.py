"""One run's checkpointing life: snapshot, seal, persist, commit, restore, replay."""

from lightning_moe_ckpt.session._averages import Averages as Averages
from lightning_moe_ckpt.session._averages import is_average as is_average
from lightning_moe_ckpt.session._codec import Unread as Unread
from lightning_moe_ckpt.session._codec import decode as decode
from lightning_moe_ckpt.session._codec import encode as encode
from lightning_moe_ckpt.session._codec import refusals as refusals
from lightning_moe_ckpt.session._codec import register_enum as register_enum
from lightning_moe_ckpt.session._config import LifeConfig as LifeConfig
from lightning_moe_ckpt.session._deltas import DeltaFigures as DeltaFigures
from lightning_moe_ckpt.session._description import read_extra as read_extra
from lightning_moe_ckpt.session._journal import decode_journal as decode_journal
from lightning_moe_ckpt.session._journal import differs as differs
from lightning_moe_ckpt.session._life import Life as Life
from lightning_moe_ckpt.session._loss_figures import LossFigures as LossFigures
from lightning_moe_ckpt.session._report import Report as Report
from lightning_moe_ckpt.session._rng import HeldGenerator as HeldGenerator
from lightning_moe_ckpt.session._rng import RngState as RngState
from lightning_moe_ckpt.session._rng import capture_rng as capture_rng
from lightning_moe_ckpt.session._rng import restore_rng as restore_rng
from lightning_moe_ckpt.session._stall import HookClock as HookClock
from lightning_moe_ckpt.session._stall import clocked as clocked
from lightning_moe_ckpt.session._stop_signal import EXIT_STATUS as EXIT_STATUS
from lightning_moe_ckpt.session._stop_signal import StopSignal as StopSignal
from lightning_moe_ckpt.session._versions import VERSIONS as VERSIONS
from lightning_moe_ckpt.session._versions import in_words as in_words
