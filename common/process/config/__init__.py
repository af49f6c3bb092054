"""The configuration of a run: one TOML file, frozen records, checked when built.

The sections `run`, `task`, `sync`, `outer`, `staleness`, `quorum` and `bounds` define the run
(`run.py`): they go into its specification, and a daemon whose file disagrees is refused. The
sections `bus`, `store`, `learner`, `aggregator`, `gc` and `metrics` configure one daemon
(`daemon.py`), and may differ from machine to machine. docs/configuration.md is generated from them.
"""

from diloco.common.process.config.advice import Broken, broken, warnings
from diloco.common.process.config.daemon import (
    AXES,
    DAEMON_SECTIONS,
    MOST_SUPERVISORS,
    AggregatorSection,
    BusSection,
    Config,
    GcSection,
    IslandSection,
    LearnerSection,
    MeshSection,
    MetricsSection,
)
from diloco.common.process.config.environment import (
    ServiceManager,
    allows_accelerators,
    allows_http,
    cache_home,
    change_environment,
    encode_on_threads,
    environment_with,
    first_rank,
    is_journal,
    keep_off_accelerators,
    keep_offline,
    service_manager,
    storage_emulator,
    store_emulator,
    store_url,
    tasks_of_step,
    visible_devices,
    webhook,
)
from diloco.common.process.config.reading import (
    explain,
    load_config,
    make_config,
    parse_settings,
    placed_config,
    read_document,
    with_mesh,
)
from diloco.common.process.config.run import (
    CHANGEABLE,
    BoundsSection,
    LearnerBounds,
    QuorumSection,
    RunSection,
    RunSettings,
    Section,
    StalenessSection,
    SyncSection,
    TaskSection,
    averaged_settings,
    changes,
    check_changeable,
    check_same_run,
    differences,
    fitted,
    settings_of,
    sync_of,
    unfilled,
)
