"""A whole run of real processes, left alone: it ends by itself and all invariants hold."""

from audit import read_tape


def test_three_learners_train_until_the_run_ends_by_itself(new_world):
    world = new_world()
    learners = [world.learner(f"learner-{index}") for index in range(3)]
    # On a busy machine one may start so late that the others end the run without it.
    world.until(lambda: len({one.learner for one in read_tape(world).sent()}) == 3, "updates")
    aggregator = world.aggregator()
    assert aggregator.wait() == 0
    assert [learner.wait() for learner in learners] == [0, 0, 0]
    tape = read_tape(world)
    tape.check()
    for process in (aggregator, *learners):
        process.check_clean_log()
    assert not tape.garbage
    assert not tape.rejected()
    # 96 steps at H = 8: offsets 2, 5 and 8 give 12 versions each, and the flush at the end more.
    assert min(tape.versions()) >= 12
    names = {update.learner for update in tape.merged()}
    assert names == {"learner-0", "learner-1", "learner-2"}
