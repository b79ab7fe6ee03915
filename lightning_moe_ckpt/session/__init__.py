"""One run's checkpointing life: snapshot, seal, persist, commit, restore, replay."""

from lightning_moe_ckpt.session._life import CheckpointSession as CheckpointSession
from lightning_moe_ckpt.session._report import Report as Report
