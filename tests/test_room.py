"""Room: what a peer says to whoever asks how long a microbatch would wait."""

from swarm.core.room import Room


def test_a_peer_takes_microbatches_at_the_pace_at_which_it_can_do_them_whole() -> None:
    room, now, taken = Room(), 100.0, 0
    while now < 160.0:  # forward takes 1 s and backward 2 s, of which none has come back yet
        if room.waits_s(0.0, now=now) == 0:
            room.taken(3.0, now=now)
            taken += 1
        now += 0.5
    assert taken == 20


def test_what_waits_counts_where_it_is_more_and_idle_time_is_not_saved_up() -> None:
    room = Room()
    room.taken(3.0, now=0.0)
    assert room.waits_s(7.0, now=1.0) == 7.0
    assert room.waits_s(0.0, now=1.0) == 2.0
    assert room.waits_s(0.0, now=50.0) == 0.0
    room.taken(3.0, now=50.0)
    assert room.waits_s(0.0, now=50.0) == 3.0
