"""Indexes of what there may be very many of: objects of a file or a store."""

from diloco.common.storage.bundle.contents import BLOCK, BundleContents, FilePiece
from diloco.judge.objects import Listing

MANY = 3 * BLOCK + 7


def test_contents_are_found_by_name_and_listed_in_their_order() -> None:
    contents = BundleContents()
    named = [(f"run/{index * 7919 % MANY:05d}", index) for index in range(MANY)]
    for name, index in named:
        contents.add(name, 10 + index, FilePiece(index, 0, 10 + index))
    assert len(contents) == MANY
    assert [*contents.sizes()] == [(name, 10 + index) for name, index in named]
    for name, index in named:
        whole = contents.get(name)
        assert whole is not None
        assert (whole.size_bytes, whole.pieces) == (10 + index, (FilePiece(index, 0, 10 + index),))
    assert contents.get("run/other") is None
    assert not contents.damaged()


def test_what_lacks_a_piece_or_is_there_twice_is_damaged() -> None:
    contents = BundleContents()
    contents.add("whole", 10, FilePiece(1, 0, 6))
    contents.add("whole", 10, FilePiece(2, 6, 10))
    contents.add("cut", 10, FilePiece(3, 0, 6))
    contents.add("twice", 4, FilePiece(4, 0, 4))
    contents.add("twice", 4, FilePiece(5, 0, 4))
    contents.add("headless", 10, FilePiece(6, 6, 10))
    assert contents.damaged() == 2
    contents.drop_damaged()
    assert "cut" not in contents
    whole, once = contents.get("whole"), contents.get("twice")
    assert whole is not None
    assert whole.pieces == (FilePiece(1, 0, 6), FilePiece(2, 6, 10))
    assert once is not None
    assert once.pieces == (FilePiece(4, 0, 4),)


def test_a_listing_knows_sizes_and_what_another_one_lacks() -> None:
    tape = Listing((f"o{index}", index) for index in range(MANY))
    there = Listing(
        ((f"o{index}", index + (index == 5)) for index in range(9, -1, -1)), "o3".__eq__
    )
    assert (len(tape), tape.size("o700"), tape.size("o")) == (MANY, 700, None)
    amiss = tape.missing_from(there)
    assert len(amiss) == MANY - 9
    assert "o5" in amiss
    assert "o6" not in amiss
    assert "o10" in amiss
    assert there.picked == ["o3"]
    assert len(tape.missing_from(Listing())) == MANY
    assert not Listing().missing_from(tape)
