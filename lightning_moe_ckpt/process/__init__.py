"""The training process: its forks, heap, signals, and the time it is kept waiting.

Internal: may change in any version.
"""

from lightning_moe_ckpt.process._account import ACCOUNT_NBYTES as ACCOUNT_NBYTES
from lightning_moe_ckpt.process._account import Balance as Balance
from lightning_moe_ckpt.process._account import Origin as Origin
from lightning_moe_ckpt.process._account import RunAccount as RunAccount
from lightning_moe_ckpt.process._account import read_account as read_account
from lightning_moe_ckpt.process._account import rounded as rounded
from lightning_moe_ckpt.process._heap import FrozenHeap as FrozenHeap
from lightning_moe_ckpt.process._heap import collections_paused as collections_paused
from lightning_moe_ckpt.process._stall import HookClock as HookClock
from lightning_moe_ckpt.process._stall import Overhead as Overhead
from lightning_moe_ckpt.process._stall import StallMeter as StallMeter
from lightning_moe_ckpt.process._stall import clocked as clocked
from lightning_moe_ckpt.process._stop_signal import EXIT_STATUS as EXIT_STATUS
from lightning_moe_ckpt.process._stop_signal import StopSignal as StopSignal
from lightning_moe_ckpt.process._stragglers import OwnWork as OwnWork
from lightning_moe_ckpt.process._stragglers import StragglerFigures as StragglerFigures
from lightning_moe_ckpt.process._stragglers import Stragglers as Stragglers
from lightning_moe_ckpt.process._suspects import MADE as MADE
from lightning_moe_ckpt.process._suspects import RECEIVED as RECEIVED
from lightning_moe_ckpt.process._suspects import AuditFigures as AuditFigures
from lightning_moe_ckpt.process._suspects import Finding as Finding
from lightning_moe_ckpt.process._suspects import Messages as Messages
from lightning_moe_ckpt.process._suspects import OnFault as OnFault
from lightning_moe_ckpt.process._suspects import Trace as Trace
from lightning_moe_ckpt.process._suspects import distance as distance
from lightning_moe_ckpt.process._suspects import judge as judge
from lightning_moe_ckpt.process._suspects import odd_holders as odd_holders
from lightning_moe_ckpt.process._threads import CallThread as CallThread
from lightning_moe_ckpt.process._threads import compute_alone as compute_alone
from lightning_moe_ckpt.process._threads import guard_forks as guard_forks
