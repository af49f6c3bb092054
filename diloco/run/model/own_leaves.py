"""Reads the leaves that a learner keeps for itself from its newest checkpoint.

These are its private leaves and its local state, which are nowhere else: on this machine's disk, or
among the learner's uploads in the run's store.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

from diloco.common.process.config import LearnerSection
from diloco.common.protocol.errors import CheckpointError, ConfigError
from diloco.common.storage.tape import RunContext
from diloco.learner.load_and_check_task import model_of
from diloco.learner.tensors import checkpoint as checkpoints
from diloco.learner.tensors import tree
from diloco.learner.tensors.checkpoint import CheckpointObject, Folder, HostCheckpoint
from diloco.learner.wire.checkpoint_save_and_restore import key_of, unsealed
from diloco.run.model.load import Arrays

# A checkpoint of a task with own leaves is the pair (the optimizer's state, those leaves).
OWN = "[1]"


def own_leaves(context: RunContext, section: LearnerSection, learner: str) -> Arrays:
    """Returns, by name, a learner's private leaves and local state, of its newest checkpoint.

    Leaves of modules that the learner did not hold are left out.

    Args:
        context: the run's context.
        section: the section of the learner's file, which says where its checkpoints are, and the
            key of those that it uploads.
        learner: the learner's name.

    Raises:
        ConfigError: the task has no such leaves, or no checkpoint of this learner can be read.
        StoreError: the run's store cannot be read.
    """
    task = model_of(context.settings)
    own, _ = tree.split(task.shapes, tree.division_of(task, task.shapes).own)
    if not jax.tree.leaves(own):
        raise ConfigError(
            "--learner: the run's task has neither private leaves nor local state",
            hint="leave it out: all learners have the global model",
        )
    why = "there is none here and in the store"
    for read in _readers(context, section, learner):
        try:
            found = checkpoints.below(read(), OWN)
            like, in_part = (None, own), bool(found.facts.holds)
            checkpoints.check_facts(
                found.facts,
                None if in_part else like,
                run=context.run,
                layout=context.layout.digest,
                learner=learner,
            )
            build = checkpoints.rebuild_some if in_part else checkpoints.rebuild
            leaves = tree.by_name(build(like, found)[1])
            return {
                name: np.asarray(leaf)
                for name, leaf in leaves.items()
                if not isinstance(leaf, jax.ShapeDtypeStruct)
            }
        except CheckpointError as error:
            why = error.message
    raise ConfigError(
        f"--learner: no checkpoint of {learner!r} can be read: {why}",
        hint="give the learner's own file as RUN, on its machine, or with checkpoint_upload and its"
        " checkpoint_key; of a learner of several hosts each host has its part alone",
    )


def _readers(
    context: RunContext, section: LearnerSection, learner: str
) -> Iterator[Callable[[], HostCheckpoint]]:
    """Yields functions that read a checkpoint, newest first: on this machine's disk, then uploads.

    Each raises CheckpointError if its checkpoint cannot be read.
    """
    if section.checkpoint_dir is not None:
        path = Path(section.checkpoint_dir) / context.run / learner
        folder = Folder(path, section.checkpoint_keep)
        for number in folder.numbers():
            yield partial(_of_folder, folder, number)
    key = key_of(section)
    for stored in checkpoints.stored(context.store, context.run, learner):
        yield partial(_uploaded, context, stored, key)


def _of_folder(folder: Folder, number: int) -> HostCheckpoint:
    facts = folder.facts(number)
    return checkpoints.state_in(HostCheckpoint(facts, folder.arrays(number, facts)))


def _uploaded(context: RunContext, stored: CheckpointObject, key: bytes | None) -> HostCheckpoint:
    return unsealed(context.run, stored, context.store.get(stored.name), key)
