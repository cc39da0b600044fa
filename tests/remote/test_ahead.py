"""What is fetched of a remote object before it is asked for, in whatever order it is then read."""

from __future__ import annotations

from collections import Counter

from ckpttool.remote.ahead import Ahead, Line

PIECE, PIECES = 64 << 10, 6


def expected(asked: Counter[int]) -> Ahead:
    """Return an object of six pieces that are all expected; requests are counted by piece."""

    def fetch(begin: int, end: int) -> bytes:
        asked[begin // PIECE] += 1
        return bytes(end - begin)

    one, line, whole = Ahead(fetch), Line(), (0, PIECES * PIECE)
    one.expect([whole], [whole], PIECE, 0, line)
    line.add(one, *whole)
    return one


def read(one: Ahead, *pieces: int) -> None:
    for piece in pieces:
        one.fill(piece * PIECE, memoryview(bytearray(PIECE)))


def test_what_was_read_is_not_fetched_again_with_a_piece_that_had_to_make_room() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 0, 1, 2)
    one.put_off(one._pieces[3 * PIECE])  # as too much is held while many objects are read
    read(one, 4, 5, 3)
    assert asked == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert not one._pieces, "and nothing is held that nobody will take"


def test_the_rest_of_a_piece_that_had_to_make_room_is_all_that_is_waited_for() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 0)
    one.fill(PIECE, memoryview(bytearray(PIECE - 8)))
    one.put_off(one._pieces[PIECE])
    one.fill(2 * PIECE - 8, memoryview(bytearray(8)))
    assert PIECE not in one._pieces, "or it would be held, and take room, until the end"
    read(one, 2, 3, 4, 5)
    assert asked[1] == 2
    assert not one._pieces


def test_pieces_read_out_of_order_are_fetched_once() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, 5, 3, 0, 1, 4, 2)
    assert asked == dict.fromkeys(range(PIECES), 1)
    assert not one._pieces


def test_what_is_read_a_second_time_is_fetched_ahead_again() -> None:
    asked: Counter[int] = Counter()
    one = expected(asked)
    read(one, *range(PIECES))
    read(one, 0)
    assert len(one._pieces) == PIECES - 1
    read(one, *range(1, PIECES))
    assert asked == dict.fromkeys(range(PIECES), 2)
    assert not one._pieces
