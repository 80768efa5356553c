"""What a status looks like to its owner."""

from rich.console import Console

from peer.owner.view import page
from swarm.proto import daemon_pb2 as pb


def shown(*peers: pb.Peer) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(page(pb.Status(peers=peers)))
    return capture.get()


def test_a_run_in_windows_says_which_inner_step_it_is_at_and_when_the_next_round_is() -> None:
    place = pb.Place(num_stages=1, version=12, total_steps=200, num_members=4, is_member=True, standing="member")
    place.local_steps, place.inner_steps_taken, place.window_left_s = 20, 7, 660.0
    work = pb.Work(last_step=11, last_step_tokens=10, last_step_all_tokens=40, since_last_s=300.0)
    text = shown(pb.Peer(state="working", run_name="my-run", place=place, work=work))
    assert "Useful: window 12, inner step 7 of 20; the last one counted 5 min ago." in text
    assert "12 of 200" in text
    assert "7 of 20; next round in 11" in text
    assert "25 % of window 11" in text
    place.window_left_s = -1.0
    assert "next round" not in shown(pb.Peer(state="working", place=place, work=work))


def test_a_run_in_steps_says_nothing_of_windows() -> None:
    place = pb.Place(num_stages=2, version=12, total_steps=200, num_members=4, is_member=True, standing="member")
    text = shown(pb.Peer(state="working", place=place, work=pb.Work(since_last_s=3.0)))
    assert "window" not in text
    assert "Useful: its neighbours signed for work it did 3 s ago." in text


def test_one_of_a_kind_is_called_so() -> None:
    place = pb.Place(num_stages=2, num_members=1, is_member=True)
    text = shown(pb.Peer(state="working", place=place, work=pb.Work(), num_neighbours=1))
    assert "0 of 2 (counted from 0), its only member" in text
    assert "1 peer answers" in text
    place.is_member = False
    assert "1 member, not yet one" in shown(pb.Peer(state="working", place=place, work=pb.Work()))


def test_each_of_several_peers_is_told_of_and_the_machine_once() -> None:
    place = pb.Place(num_stages=2, version=12, total_steps=200, num_members=4, is_member=True, standing="member")
    works = pb.Peer(name="GPU 0", state="working", place=place, work=pb.Work(since_last_s=3.0), device="cuda:0")
    text = shown(works, pb.Peer(name="GPU 1", state="ended", reason="this peer is banned from the run"))
    assert "GPU 0  WORKING" in text
    assert text.index("GPU 1  ENDED") < text.index("this peer is banned from the run")
    assert text.count("traffic") == 1
    assert "together" in text
    assert "together" not in shown(works)
