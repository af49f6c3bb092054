"""The configuration: defaults, checks that name key and value, and who may differ in what."""

import msgpack
import pytest

from diloco.common.process.config import (
    DAEMON_SECTIONS,
    Config,
    RunSettings,
    check_same_run,
    differences,
    fitted,
    load_config,
    make_config,
    parse_settings,
    storage_emulator,
    unfilled,
    warnings,
)
from diloco.common.protocol.errors import ConfigError, RunMismatchError
from diloco.common.protocol.layout import Tensor, make_layout

LEAST = {"run": {"name": "r", "steps": 100}, "store": {"url": "file:///tmp/x"}}


def document(**sections):
    made = {name: dict(section) for name, section in LEAST.items()}
    for name, section in sections.items():
        made[name] = {**made.get(name, {}), **section}
    return made


def make(**sections) -> Config:
    return make_config(document(**sections), source="run.toml")


def refusal(**sections) -> str:
    with pytest.raises(ConfigError) as caught:
        make(**sections)
    assert caught.value.message.startswith("run.toml: ")
    assert caught.value.hint == "docs/configuration.md lists every key"
    return caught.value.message


def test_a_name_a_length_and_a_store_are_enough():
    config = make()
    # The paper's schedule, int4 on both links, Nesterov, K = 1 with grace (docs/design/paper.md, section 1).
    assert (config.sync.interval_steps, config.sync.overlap_steps) == (24, 2)
    assert (config.sync.codec, config.sync.delta_codec) == ("int4", "int4")
    assert (config.outer.optimizer, config.outer.merge) == ("sgd", "rda")
    assert (config.quorum.min_learners, config.quorum.grace_fraction) == (1, 0.9)
    assert (config.staleness.rule, config.staleness.power) == ("polynomial", 0.5)
    assert config.staleness.max_versions == 0
    assert warnings(config) == []


def test_whose_the_learners_are_decides_the_merge_and_its_usual_step():
    own, others = make(), make(run={"name": "r", "steps": 100, "trust": "others"})
    assert (own.merge, own.outer.learning_rate) == ("rda", 0.9)
    assert (others.merge, others.outer.learning_rate) == ("centered_clipping", 1.25)
    said = {"name": "r", "steps": 100, "trust": "others"}
    assert make(run=said, outer={"learning_rate": 0.9}).outer.learning_rate == 0.9
    again = RunSettings.model_validate(others.settings().model_dump())
    assert again == others.settings()
    assert warnings(others) == []


REFUSED = [
    ("run", "steps", 0),
    ("run", "tokens", -1),
    ("run", "name", "Big"),
    ("run", "name", "a.b"),
    ("run", "name", "x" * 41),
    ("task", "build", "learner.model"),
    ("sync", "interval_steps", 0),
    ("sync", "fragments", 4097),
    ("sync", "codec", "int3"),
    ("sync", "delta_codec", "fp8"),
    ("sync", "block", 48),
    ("sync", "shard_elements", 1000),
    ("sync", "overlap_steps", -1),
    ("sync", "min_steps", 0),
    ("sync", "mode", "sync"),
    ("sync", "adopt", "mix"),
    ("sync", "alpha", 1.5),
    ("sync", "snapshot_interval_versions", 0),
    ("sync", "reannounce_timeout_s", 0),
    ("outer", "optimizer", "adam"),
    ("outer", "learning_rate", 0),
    ("outer", "momentum", 1),
    ("outer", "delay_rounds", 0),
    ("outer", "delay_fraction", 2),
    ("outer", "merge", "ties"),
    ("staleness", "rule", "linear"),
    ("staleness", "power", -1),
    ("staleness", "rate", -0.5),
    ("staleness", "threshold", -1),
    ("staleness", "max_versions", -1),
    ("quorum", "min_learners", 0),
    ("quorum", "grace_fraction", 1.1),
    ("quorum", "grace_cap_s", -1),
    ("quorum", "deadline_s", 0),
    ("quorum", "pace", -0.1),
    ("quorum", "liveness_timeout_s", 0),
    ("bounds", "max_tokens_per_step", 0),
    ("bounds", "max_steps_per_s", 0),
    ("bounds", "norm_clip", 1),
    ("bus", "replicas", 6),
    ("bus", "duplicate_window_s", 0),
    ("bus", "ops_max_bytes", 1),
    ("learner", "heartbeat_interval_s", 0),
    ("learner", "drain_timeout_s", -1),
    ("learner", "checkpoint_interval_s", 0),
    ("learner", "checkpoint_keep", 0),
    ("aggregator", "name", "A b"),
    ("outer", "learning_rate", float("nan")),
    ("quorum", "deadline_s", float("inf")),
    ("sync", "fragments", "many"),
]


@pytest.mark.parametrize(("section", "key", "value"), REFUSED)
def test_a_check_names_key_and_value(section, key, value):
    message = refusal(**{section: {key: value}})
    assert f"'{section}.{key}'" in message
    assert f"got {value!r}" in message


def test_a_wrong_bound_of_one_learner_names_the_learner():
    bounds = {"learners": {"a": {"max_steps_per_s": -1}}}
    assert "'bounds.learners.a.max_steps_per_s'" in refusal(bounds=bounds)


@pytest.mark.parametrize("value", [0, 1.5, "fast"])
def test_a_check_of_one_learners_speed_names_the_learner(value):
    assert "'learner.speed.slow'" in refusal(learner={"speed": {"slow": value}})


@pytest.mark.parametrize(
    ("sync", "named"),
    [
        ({"min_steps": 25}, ["min_steps (25)", "interval_steps (24)"]),
        (
            {"warmup_steps": 100, "warmup_interval_steps": 4},
            ["min_steps (6)", "warmup_interval_steps (4)"],
        ),
        ({"alpha": 0.5}, ["alpha", "adopt = 'overwrite'"]),
    ],
)
def test_settings_that_contradict_each_other_are_both_named(sync, named):
    message = refusal(sync=sync)
    assert "'sync'" in message
    assert all(part in message for part in named)


def test_what_is_uploaded_must_be_kept_first():
    message = refusal(learner={"checkpoint_upload": True})
    assert "'learner'" in message
    assert "checkpoint_dir" in message


def test_alpha_goes_with_overwriting():
    assert make(sync={"alpha": 0.5, "adopt": "overwrite"}).sync.alpha == 0.5


def test_unknown_and_missing_keys_are_named():
    assert "unknown key 'sync.intervall'" in refusal(sync={"intervall": 3})
    assert "unknown key 'snyc'" in refusal(snyc={})
    with pytest.raises(ConfigError, match=r"'run\.steps' is missing; 'store' is missing"):
        make_config({"run": {"name": "r"}}, source="x")


def test_all_faults_are_told_at_once():
    message = refusal(sync={"block": 1}, quorum={"pace": -1})
    assert "'sync.block'" in message
    assert "'quorum.pace'" in message


def test_a_section_that_is_no_table_is_named():
    with pytest.raises(ConfigError, match="'sync'"):
        make_config({**LEAST, "sync": 3}, source="x")


# Files and the environment

FILE = """
[run]
name = "r"
steps = 100
[store]
url = "file:///tmp/x"
[bus]
replicas = 3
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    for variable in ("DILOCO_BUS_URL", "DILOCO_STORE_URL"):
        monkeypatch.delenv(variable, raising=False)
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    return file


def test_a_file_is_read(path):
    assert load_config(path).bus.replicas == load_config(str(path)).bus.replicas == 3


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[run\n", "not valid TOML"),
        (b"a = " + b"9" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"\xff\xfe", "cannot read"),
        (b"", "'run' is missing"),
    ],
)
def test_a_file_that_is_none_is_named(path, content, named):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=named) as caught:
        load_config(path)
    assert "run.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere") as caught:
        load_config(tmp_path / "nowhere.toml")
    assert "the path of the run's TOML file" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path)


def test_the_environment_overrides_what_daemons_may_differ_in(path, monkeypatch):
    monkeypatch.setenv("DILOCO_BUS_URL", "nats://elsewhere:4222")
    monkeypatch.setenv("DILOCO_BUS_DUPLICATE_WINDOW_S", "60")
    monkeypatch.setenv("DILOCO_AGGREGATOR_NAME", "here")
    monkeypatch.setenv("DILOCO_STORE_URL", "/other")
    config = load_config(path)
    assert config.bus.url == "nats://elsewhere:4222"
    assert config.bus.duplicate_window_s == 60.0
    assert config.bus.replicas == 3
    assert config.aggregator.name == "here"
    assert config.store.url == "/other"


def test_the_environment_cannot_change_the_run(path, monkeypatch):
    monkeypatch.setenv("DILOCO_RUN_STEPS", "7")
    monkeypatch.setenv("DILOCO_SYNC_CODEC", "float32")
    monkeypatch.setenv("DILOCO", "x")
    monkeypatch.setenv("DILOCO_BUS", "x")
    assert load_config(path) == make(bus={"replicas": 3})


def test_the_environment_is_checked_like_the_file(path, monkeypatch):
    monkeypatch.setenv("DILOCO_BUS_REPLICAS", "9")
    with pytest.raises(ConfigError, match=r"'bus\.replicas'.*got '9'"):
        load_config(path)
    monkeypatch.setenv("DILOCO_BUS_REPLICAS", "3")
    monkeypatch.setenv("DILOCO_BUS_NONESUCH", "1")
    with pytest.raises(ConfigError, match=r"unknown key 'bus\.nonesuch'"):
        load_config(path)


def test_the_environment_does_not_hide_a_section_that_is_no_table(path, monkeypatch):
    path.write_text(FILE.replace("[bus]\nreplicas = 3", "").replace("[run]", "bus = 3\n[run]"))
    monkeypatch.setenv("DILOCO_BUS_URL", "nats://elsewhere:4222")
    with pytest.raises(ConfigError, match="'bus'"):
        load_config(path)


# One run, many files


def test_the_daemons_sections_are_not_the_runs():
    assert set(Config.model_fields) - set(RunSettings.model_fields) == set(DAEMON_SECTIONS)
    here = make(
        bus={"url": "nats://a:1"}, learner={"heartbeat_interval_s": 9.0}, aggregator={"name": "x"}
    )
    assert here.settings() == make().settings()
    assert type(here.settings()) is RunSettings


def test_settings_survive_the_specification():
    settings = make(
        task={"build": "my.task:build", "options": {"layers": 3, "names": ["a"]}},
        staleness={"rule": "hinge"},
    ).settings()
    assert parse_settings(settings.model_dump()) == settings


def test_a_specification_of_another_program_is_refused():
    fields = make().settings().model_dump()
    fields["sync"]["from_the_future"] = 1
    with pytest.raises(ConfigError, match=r"unknown key 'sync\.from_the_future'") as caught:
        parse_settings(fields)
    assert "another version" in caught.value.hint


def test_each_difference_names_both_sides():
    ours = make(sync={"codec": "int8"}, outer={"momentum": 0.5}).settings()
    theirs = make().settings()
    assert differences(ours, theirs) == [
        "sync.codec: 'int8' here, 'int4' in the run",
        "outer.momentum: 0.5 here, 0.9 in the run",
    ]
    assert differences(theirs, theirs) == []


def test_whole_configurations_may_be_compared_too():
    """A `Config` is a `RunSettings`; what daemons may differ in is no difference of runs."""
    ours = make(bus={"url": "nats://a:1"}, sync={"codec": "int8"})
    assert differences(ours, make().settings()) == ["sync.codec: 'int8' here, 'int4' in the run"]


def test_another_run_is_refused_with_everything_that_differs():
    ours, theirs = make(sync={"codec": "int8"}).settings(), make().settings()
    with pytest.raises(RunMismatchError) as caught:
        check_same_run(ours, theirs, "a" * 32, "b" * 32)
    message = caught.value.message
    assert "run 'r'" in message
    assert "sync.codec: 'int8' here, 'int4' in the run" in message
    assert f"layout digest: {'a' * 32} here, {'b' * 32} in the run" in message
    check_same_run(theirs, theirs, "a" * 32, "a" * 32)


def test_a_file_may_ask_for_more_fragments_than_the_tensors_fill():
    tensors = [Tensor(name="a", shape=(3, 4), dtype="float32")]
    asked, few = make(sync={"fragments": 8}).settings(), make(sync={"fragments": 2}).settings()
    layout = make_layout(tensors, fragments=8, block=16)
    assert fitted(asked, layout) == make(sync={"fragments": 3}).settings()
    assert "fragments is 8, but the model's tensors fill only 3" in unfilled(asked, 3)
    assert fitted(few, layout) == few, "a run of more than the file says is another"
    assert not unfilled(few, 2)


# Regions known to be bad

NESTEROV = {"optimizer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"sync": {"interval_steps": 2, "fragments": 2, "min_steps": 1}}, "interval_steps = 2"),
        ({"quorum": {"grace_fraction": 0}}, "quorum of 1 without grace"),
        ({"quorum": {"pace": 0}, "outer": NESTEROV | {"momentum": 0.5}}, "pace = 0"),
        ({"outer": NESTEROV}, "momentum = 0.9 in a run of"),
        ({"outer": NESTEROV | {"learning_rate": 1.3}}, "learning_rate 1.3"),
        ({"outer": NESTEROV | {"momentum": 0.95}}, "momentum 0.95"),
        ({"outer": {"learning_rate": 20}}, "learning_rate 20"),
        ({"outer": {"learning_rate": 1.5, "merge": "average"}}, "learning_rate 1.5"),
        ({"sync": {"overlap_steps": 11}}, "overlap_steps = 11"),
        ({"sync": {"adopt": "overwrite", "overlap_steps": 4, "interval_steps": 8}}, "tau = 4"),
        ({"outer": {"merge": "average"}}, "merge = 'average' with rate 0.9"),
        ({"outer": {"participation": True}}, "participation = true"),
    ],
)
def test_what_trains_badly_is_warned_of(sections, named):
    (sentence,) = warnings(make(**sections))
    assert named in sentence


@pytest.mark.parametrize(
    "sections",
    [
        {"quorum": {"grace_fraction": 0, "min_learners": 2}},
        {"quorum": {"pace": 0}, "sync": {"mode": "lockstep"}},
        {"quorum": {"pace": 0}, "outer": {"optimizer": "sgd"}},
        {"outer": {"optimizer": "sgd", "learning_rate": 1.0, "merge": "average"}},
        {"outer": {"optimizer": "sgd", "learning_rate": 1.3, "merge": "average"}},
        {"outer": {"optimizer": "sgd", "learning_rate": 1.1}},
        {"outer": NESTEROV, "run": {"name": "r", "steps": 200 * 24}},
        {"sync": {"adopt": "overwrite"}},
        {"sync": {"interval_steps": 1, "fragments": 1, "min_steps": 1, "codec": "float32"}},
    ],
)
def test_what_trains_well_is_not(sections):
    assert warnings(make(**sections)) == []


def test_an_emulator_stands_in_for_google_only_where_both_sides_say_so(monkeypatch):
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    assert storage_emulator(asked_for=False) is None
    with pytest.raises(ConfigError, match="STORAGE_EMULATOR_HOST is not set"):
        storage_emulator(asked_for=True)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9000")
    assert storage_emulator(asked_for=True) == "http://127.0.0.1:9000"
    with pytest.raises(ConfigError, match=r"store\.emulator is false") as caught:
        storage_emulator(asked_for=False)
    assert "unset it" in caught.value.hint


def test_lists_among_a_tasks_options_are_the_same_after_the_wire() -> None:
    options = {"shares": ["a", "b"], "sizes": {"each": [[1, 2], [3]]}}
    ours = RunSettings.model_validate(
        {"run": {"name": "r", "steps": 1}, "task": {"options": options}}
    )
    sent = msgpack.unpackb(msgpack.packb(ours.model_dump()), use_list=False)
    assert parse_settings(sent).task.options == options
    check_same_run(ours, parse_settings(sent), "a" * 32, "a" * 32)
