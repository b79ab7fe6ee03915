"""Start the ranks of a job, and keep it running when some of them die: `moe-ckpt run`, and what a rank sees of it.

Torch's elastic agent starts the processes and its rendezvous brings nodes together; the supervisor (`_agent`) is that
agent with one other answer to a death: only the dead is replaced. Each rank has a connection to its node's supervisor
(`_supervised`), through which it learns in milliseconds of a death, and a page of memory in which it beats. Supervisors of
several nodes tell each other what happens through a log that all read in one order (`_job_log`).

Internal: may change in any version.
"""

from lightning_moe_ckpt.launch._supervised import DENSIFY as DENSIFY
from lightning_moe_ckpt.launch._supervised import RERUN as RERUN
from lightning_moe_ckpt.launch._supervised import RerunRequest as RerunRequest
from lightning_moe_ckpt.launch._supervised import Supervised as Supervised
