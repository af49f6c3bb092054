"""The configuration of a run: one TOML file, frozen records, checked when built.

The sections `run`, `task`, `sync`, `outer`, `staleness`, `quorum` and `bounds` define the run
(`run.py`): they go into its specification, and a daemon whose file disagrees is refused. The
sections `bus`, `store`, `learner`, `aggregator`, `gc` and `metrics` say how one daemon works
(`daemon.py`), and may differ from machine to machine. docs/configuration.md is generated from them.
"""

from diloco.common.config.advice import warnings
from diloco.common.config.comparing import (
    CHANGEABLE,
    changes,
    check_changeable,
    check_same_run,
    differences,
    is_changeable,
)
from diloco.common.config.daemon import (
    DAEMON_SECTIONS,
    AggregatorSection,
    BusSection,
    Config,
    GcSection,
    IslandSection,
    LearnerSection,
    MeshSection,
    MetricsSection,
    StoreSection,
)
from diloco.common.config.environment import (
    ServiceManager,
    allows_accelerators,
    allows_http,
    encode_on_one_thread,
    environment_with,
    is_journal,
    keep_off_accelerators,
    service_manager,
    storage_emulator,
    store_emulator,
    store_url,
    visible_devices,
    webhook,
)
from diloco.common.config.fields import Section
from diloco.common.config.reading import (
    explain,
    load_config,
    make_config,
    parse_settings,
    placed_config,
    read_document,
    with_mesh,
)
from diloco.common.config.renamed import RENAMED
from diloco.common.config.run import (
    BUILT_IN_TASK,
    BUILT_IN_TASK_0_1,
    BoundsSection,
    LearnerBounds,
    OuterSection,
    QuorumSection,
    RunSection,
    RunSettings,
    StalenessSection,
    SyncSection,
    TaskSection,
)

__all__ = [
    "BUILT_IN_TASK",
    "BUILT_IN_TASK_0_1",
    "CHANGEABLE",
    "DAEMON_SECTIONS",
    "RENAMED",
    "AggregatorSection",
    "BoundsSection",
    "BusSection",
    "Config",
    "GcSection",
    "IslandSection",
    "LearnerBounds",
    "LearnerSection",
    "MeshSection",
    "MetricsSection",
    "OuterSection",
    "QuorumSection",
    "RunSection",
    "RunSettings",
    "Section",
    "ServiceManager",
    "StalenessSection",
    "StoreSection",
    "SyncSection",
    "TaskSection",
    "allows_accelerators",
    "allows_http",
    "changes",
    "check_changeable",
    "check_same_run",
    "differences",
    "encode_on_one_thread",
    "environment_with",
    "explain",
    "is_changeable",
    "is_journal",
    "keep_off_accelerators",
    "load_config",
    "make_config",
    "parse_settings",
    "placed_config",
    "read_document",
    "service_manager",
    "storage_emulator",
    "store_emulator",
    "store_url",
    "visible_devices",
    "warnings",
    "webhook",
    "with_mesh",
]
