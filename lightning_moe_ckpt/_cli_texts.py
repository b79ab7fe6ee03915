"""Help of the commands that look at stored runs, places or clusters: what each does, and its exit status."""

LS = """\
List what is stored under URL, newest first, and say of each generation whether a restart would try it.

Reads names, the log and manifests, no segments: `verify` reads those. KIND is dense if one step holds everything,
sparse if a window of steps adds up to it, partial if it references experts from older ones; NEEDS says from which. Works
while the run goes on, and writes nothing.

Exit status: 0 listed, 2 there is no run or it could not be read."""

INSPECT = """\
Show one generation: how it was planned, which operator was captured at which step, and which rank wrote what.

Reads the markers of all ranks, no segments. What a partial generation takes from older ones is shown with its step. Sizes
are without padding; `compute` is what forward and backward of replayed steps need of an operator whose full state comes
later in the window.

Exit status: 0 shown, 2 there is no such generation or its markers could not be read."""

VERIFY = """\
Read every byte of committed generations, and the log, and compare all digests.

Without --step and --all: each generation that a restart would try, and what it references. Files stream past, so memory
does not depend on their size.

Exit status: 0 all good, 1 something is damaged or there is nothing to restore, 2 could not be read."""

EXPORT = """\
Write a generation as files that other programs read; experts of all ranks are put together. Those that a partial
generation references are as old as they are; the file says which.

\b
OUT decides what is written:
  *.safetensors   parameters and buffers by name
  *.ckpt          what Lightning would have saved, for load_from_checkpoint
                  and Trainer.fit(ckpt_path=...); it passes
                  torch.load(weights_only=True), and what does not is left
                  out and named
  a folder        for from_pretrained of transformers: config.json and
                  weights of the Hugging Face model in the module

Names are those of the module's state_dict: with tied weights, without buffers that are not persistent. Buffers are
those of rank 0. No format has what an exact restart needs; a run itself resumes from URL. A sparse generation is several
steps in one and cannot be exported, since only replay in training makes them one: the message names the nearest dense one.
SparseCheckpoint(dense_every_n_steps=...) leaves one now and then, and each run where it ends.

Exit status: 0 written, 2 not written."""

GC = """\
Delete what no restart would use any more, and say why; with --dry-run only say it.

Without --keep-...: what the run itself has given up but not deleted, because it was killed or its storage failed. These are
generations older than those it keeps, those of a start that a later one replaced, those that a start which is over never
committed, and those of an earlier run at this URL once the newer one has as many as it keeps; and what their interrupted writes
and uploads left.

With --keep-...: first gives up all that none of these rules keeps; the newest always stays. What a generation
that stays refers to stays with it; if the newest references, the last two are kept, since a save may refer to both,
and with them the copy before the newest one of each operator that is taken in turns.

Manifests and sizes say what is whole. With --verify, which reads every byte of as many of the newest as --keep-last says
(2 without it), a damaged one does not count, and the next older one is kept in its place.

Works while a job uses URL, which takes note and goes on; a job that starts meanwhile picks again.

Exit status: 0 done, 2 there is no run or something could not be read or deleted; the next gc goes on there."""

TOP = """\
Show how far a run is, again and again until Ctrl-C: its newest step in every tier and of every rank, how far storage is
behind, steps and bytes per second, what checkpoints cost, starts, goodput and when it will be done.

Reads what the run writes anyway: its log, names in storage, and names in shared memory of this node. Nothing is asked of
the job, and nothing is written. Rates and ETA are as of the newest entry of the log, which the run adds when it gives up
older generations; a start that was killed may have come further than its last entry says. Goodput is the time that the steps so far would have taken without failures and checkpoints, as a share of
the time since the first start. Memory of other nodes is not seen: run the command there.

Exit status: 0 shown, 2 there is no run or it could not be read."""

REPORT = """\
Write one HTML page about a run: its steps over time, how far storage was behind, speed and overhead, every start, and what
is stored. The page needs no other file, so that it can be sent and kept.

OUT is report.html if it is not given. The figures are those of `top`: the newest thousand entries of the log, names in
storage, and memory of this node. Works while the run goes on, and changes nothing there.

Exit status: 0 written, 2 there is no run, or the page could not be written."""

REPAIR = """\
Rebuild the log of URL, of which `_log/` is gone or cannot be read, from the manifests of committed generations.

Without --yes it only shows which generations a restart would then try. What is shown as left out is not deleted. Each
generation names the line of starts that led to it; of several lines, that of the start which began last counts. A
manifest that cannot be read is made again where the markers of all ranks are good. What is in shared memory of the nodes is not
found any more, since its names were derived from the log that is lost. Stop the job first.

Exit status: 0 shown or written, 2 there is a log that can be read, or nothing to make one from."""

DOCTOR = """\
Without URL: show which compiled parts are in use, why others are not, and what limits copies on this machine. Exit status: 0
whatever was found, since everything runs without compiled parts, only slower.

With URL: try there what checkpoints rely on (listings, exclusive creates and races of them, large and half-written
objects, leftovers), and say whether they are safe. Objects are written under URL/_doctor/ and removed again, also when
interrupted; a run that is stored there is not touched. Exit status: 0 fenced, that is safe whatever happens; 1 unfenced
or unsafe, and the last line says which and what that means; 2 nothing can be written there."""

SHM = """\
List what runs have in shared memory of this node (/dev/shm/moe-ckpt-*): run, rank, newest
step, size, age, which process holds it and which user owns it. With URL only memory of the run there.

This is no garbage: a rank that is started again resumes from it, often from a newer step than storage has. URL --clear
removes what that run has left, if it will not go on. --clear without URL removes what every run has left, also those that wait to be
requeued. Neither removes what a process holds or another user owns.

Exit status: 0 listed or cleared, 2 something could not be removed."""

PLACEMENT = """\
Show who keeps copies of whose state on a cluster of NODES, and the probability that memory still holds every rank's
newest generation after nodes, or racks, are lost at once.

A run on such a cluster places its copies the same way. Ranks are numbered node by node, nodes rack by rack.

Exit status: 0 shown, 2 there can be no such placement."""
