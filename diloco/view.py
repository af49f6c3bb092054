"""The global model: the newest views of all fragments as a task's parameters."""

from common import wire
from common.tape import RunContext, load_specification
from common.views import load_view
from learner import tree
from learner.replica import Replica
from learner.task import Params, Task, params_shapes


async def load_params(context: RunContext, task: Task) -> tuple[Params, list[wire.Record]]:
    """The run's newest global view as parameters, and the records it was taken from.

    Raises:
        RunMismatchError, IntegrityError, DilocoError: as `common.views.load_view`.
    """
    fragments = range(len(context.layout.fragments))
    loaded = [await load_view(context, fragment) for fragment in fragments]
    trained, constants = tree.split(params_shapes(task))
    replica = Replica(
        context.settings.sync, context.layout, trained, [item.view for item in loaded]
    )
    specification = await load_specification(context.bus, context.run)
    if specification.constants is not None:
        data = await context.runtime.call(context.store.get, specification.constants)
        digest = specification.constants.rsplit("-", 1)[1]
        constants = tree.unpack_constants(data, constants, digest)
    return tree.join(replica.trained, constants), [item.record for item in loaded]
