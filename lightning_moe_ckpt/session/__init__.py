"""Checkpointing of one incarnation of a run: snapshot, seal, persist, commit, restore, replay.

Internal: may change in any version.
"""

from lightning_moe_ckpt.session._job import SessionJob as SessionJob
from lightning_moe_ckpt.session._report import Report as Report
from lightning_moe_ckpt.session._session import CheckpointSession as CheckpointSession
