"""A fleet of learners and the real aggregator in virtual time: `bench.protocol_clients virtual`."""

from bench.protocol_clients import parsed, run_in_virtual_time


def test_who_lives_is_in_every_version_however_many_die():
    """Nobody's work comes late, and an update waits for two steps on average at most."""
    options = parsed(
        ["--learners", "60", "--fragments", "2", "--versions", "4", "--kill", "0.05"],
        fragment=8192, interval=24, step_s=1.0, gbit=10.0, settle=2,
    )  # fmt: skip
    planned, found, crowd = run_in_virtual_time(options)
    settle = options.settle * options.fragments
    assert crowd.deaths > 0
    assert max(crowd.missing[settle:]) == 0
    assert found.staleness == planned.staleness == 0
    assert sum(crowd.waits_s) / len(crowd.waits_s) <= 2 * options.step_s
