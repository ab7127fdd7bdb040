"""Several processes: the numbers of one; words and errors of the right one; and whatever ends, all of it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from conftest import ROOT
from gti_nb import processes
from gti_nb.core import UserError
from gti_nb.processes import Board, Node, follow, gather, launch, launch_command, this_node

WORDS = dict(processes=2, device="cpu")


# --- what is launched: called in other processes by name -----------------------------------------------------------------

def settings():
    from gti_nb.training import TrainConfig
    return TrainConfig(steps=6, batch_size=8, micro_batch_size=3, learning_rate=1e-2, checkpoint_every=2, validate_every=2, weight_decay=0.1)


def train(folder, lora, spoilt=False):
    "A training; `spoilt` starts it from other rows."
    import torch
    from gti_nb.training import fit
    from test_training import examples_of, model_of, values_of
    lm = model_of(0.0 if lora else None)
    if spoilt:
        torch.nn.init.zeros_(lm.new_rows)
    examples = examples_of(lm)
    history = fit(lm, examples[:16], settings(), folder, validation=examples[16:])
    return history.to_dict("list"), values_of(lm).tolist()


def train_together(folder):
    from accelerate import PartialState
    from accelerate.utils import gather_object
    from gti_nb.core import UserError
    from gti_nb.training import TrainConfig, fit
    from test_training import examples_of, model_of
    rank = PartialState().process_index
    print(f"rank {rank} speaks", flush=True)
    print(f"rank {rank} warns", file=sys.stderr, flush=True)
    results = {name: train(f"{folder}/{name}", name == "lora", spoilt=rank == 1) for name in ("rows", "lora")}
    same = gather_object([results])
    lm, complaints = model_of(), []
    for batch, place in ((9, "odd"), (8, "rows" if rank == 0 else "elsewhere")):
        try:
            fit(lm, examples_of(lm)[:16], TrainConfig(**settings().model_dump() | {"batch_size": batch}), f"{folder}/{place}")
        except UserError as error:
            complaints.append(str(error))
    return {"results": results, "same": repr(same[0]) == repr(same[1]), "complaints": complaints}


def note(folder):
    "Write down this process's id; returns the rank."
    from accelerate import PartialState
    state = PartialState()
    Path(folder, f"pid-{state.process_index}.tmp").write_text(json.dumps([os.getpid(), os.getppid()]))
    os.replace(Path(folder, f"pid-{state.process_index}.tmp"), Path(folder, f"pid-{state.process_index}"))
    return state.process_index


def fail_while_another_waits(folder, how):
    from accelerate import PartialState
    if note(folder) == 1:
        while len(list(Path(folder).glob("pid-?"))) < 2:
            time.sleep(0.01)
        time.sleep(0.3)  # the other is in the collective by now
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UserError("the item 'x' has no title") if how == "known" else ZeroDivisionError("nothing to divide by")
    PartialState().wait_for_everyone()


def meet(folder):
    from accelerate.utils import gather_object
    note(folder)
    return gather_object([os.environ["MASTER_PORT"]])


def sleep(folder):
    note(folder)
    time.sleep(600)


# --- helpers -------------------------------------------------------------------------------------------------------------

def wait_for(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def everyone(folder, processes=2):
    "The ids of the processes that were noted, and of what started them, once all are there."
    wait_for(lambda: len(list(folder.glob("pid-?"))) == processes)
    return set(sum((json.loads(path.read_text()) for path in folder.glob("pid-?")), []))


def gone(ids):
    alive = lambda pid: psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return not any(alive(pid) for pid in ids)


def in_thread(*args, function=launch, **kwargs):
    "Run `launch` in a thread, or another function; returns the thread and where its value or its error will be."
    found = {}

    def work():
        try:
            found["value"] = function(*args, **kwargs)
        except UserError as error:
            found["error"] = str(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, found


# --- the command ---------------------------------------------------------------------------------------------------------

def test_one_process_needs_no_launcher():
    assert launch_command("a:b", {"x": [1, "ü"]}) == [sys.executable, "-m", "gti_nb.processes", "a:b", json.dumps({"x": [1, "ü"]})]


@pytest.mark.parametrize("processes, nodes", [(2, 1), (8, 1), (8, 2), (3, 3)])
def test_the_command_is_one_that_accelerate_understands(processes, nodes):
    from accelerate.commands.launch import launch_command_parser
    for rank in range(nodes):
        command = launch_command("a:b", {"x": 1}, processes, nodes, rank, "10.0.0.1", 1234)
        assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
        options = launch_command_parser().parse_args(command[3:])
        assert (options.multi_gpu, options.num_processes, options.num_machines) == (True, processes, nodes)
        assert options.main_process_port == (1234 if nodes > 1 else 0)
        if nodes > 1:
            assert (options.machine_rank, options.main_process_ip, options.same_network) == (rank, "10.0.0.1", True)
        assert options.module and [options.training_script, *options.training_script_args] == ["gti_nb.processes", "a:b", '{"x": 1}']


@pytest.mark.parametrize("kwargs, complaint", [
    (dict(processes=3, nodes=2), "take a multiple of the nodes"), (dict(processes=4, nodes=2, node_rank=2), "from 0 to 1")])
def test_impossible_nodes_are_refused(kwargs, complaint):
    with pytest.raises(UserError, match=complaint):
        launch_command("a:b", {}, **kwargs)


def test_too_few_gpus_are_told(monkeypatch):
    import torch
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes need as many GPUs, and this machine has 1"):
        launch("a:b", processes=4, device="cuda", nodes=2)


# --- numbers -------------------------------------------------------------------------------------------------------------

def test_two_processes_equal_one(tmp_path, capsys):
    found = launch("test_processes:train_together", {"folder": str(tmp_path / "two")}, **WORDS)
    printed = capsys.readouterr().out
    assert found["same"]  # both have the same, though the second one started from other rows
    for name in ("rows", "lora"):
        history, values = train(tmp_path / "one" / name, name == "lora")
        others, other_values = found["results"][name]
        assert others.keys() == history.keys() and values == pytest.approx(other_values, abs=1e-6)
        for column in history:
            assert [v for v in others[column] if v is not None] == pytest.approx([v for v in history[column] if v == v], abs=1e-6)
    assert "rank 0 speaks" in printed and "rank 0 warns" in printed and "rank 1" not in printed
    assert printed.count("train: 8 examples a step = 2 at a time x 2 x 2 processes") == 3  # and once in the last, refused one
    assert "set the batch size to 8 or 10" in found["complaints"][0]
    assert "found checkpoints of steps [6, 0]" in found["complaints"][1] and "a disk that all nodes share" in found["complaints"][1]


# --- failures ------------------------------------------------------------------------------------------------------------

def test_a_failure_beside_another_launch(tmp_path, capsys):
    "One process fails while the other waits for it; a launch beside it isn't disturbed, and has another port."
    places = [tmp_path / "good", tmp_path / "bad"]
    for place in places:
        place.mkdir()
    good, value = in_thread("test_processes:meet", {"folder": str(places[0])}, **WORDS)
    with pytest.raises(UserError, match="process 1 of 2 failed: ZeroDivisionError: nothing to divide by"):
        launch("test_processes:fail_while_another_waits", {"folder": str(places[1]), "how": "bug"}, **WORDS)
    assert gone(everyone(places[1]))
    printed = capsys.readouterr().out
    assert "in fail_while_another_waits" in printed and "ZeroDivisionError: nothing to divide by" in printed
    assert "Root Cause" not in printed and "closed" not in printed
    good.join(120)
    assert len(value["value"]) == 2 and len(set(value["value"])) == 1


def test_bad_input_is_one_line(tmp_path, capsys):
    with pytest.raises(UserError) as error:
        launch("test_processes:fail_while_another_waits", {"folder": str(tmp_path), "how": "known"}, **WORDS)
    assert str(error.value) == "the item 'x' has no title" and "Traceback" not in capsys.readouterr().out
    assert gone(everyone(tmp_path))


def test_a_killed_process_is_named(tmp_path):
    with pytest.raises(UserError, match="process 1 of 2 was ended by SIGKILL: if nobody did that, memory ran out"):
        launch("test_processes:fail_while_another_waits", {"folder": str(tmp_path), "how": "killed"}, **WORDS)
    assert gone(everyone(tmp_path))


def abort_at_exit():
    import atexit
    atexit.register(os.abort)
    print("done", end="")
    return "a value"


@pytest.mark.parametrize("processes", [1, 2])
def test_what_python_does_at_exit_cannot_spoil_a_success(processes, capsys):
    assert launch("test_processes:abort_at_exit", processes=processes, device="cpu") == "a value"
    assert "done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["test_processes:nothing", "no_such_module:f"])
def test_a_function_that_is_not_there(name):
    with pytest.raises(UserError, match=f"there is no function '{name}'"):
        launch(name, device="cpu")


def test_a_launcher_that_dies_takes_its_processes_along(tmp_path):
    thread, found = in_thread("test_processes:sleep", {"folder": str(tmp_path)}, **WORDS)
    ids = everyone(tmp_path)
    [launcher] = {psutil.Process(pid).ppid() for pid in ids if "gti_nb.processes" in psutil.Process(pid).cmdline()
                  and "accelerate.commands.launch" not in psutil.Process(pid).cmdline()}
    os.kill(launcher, signal.SIGKILL)
    thread.join(120)
    assert "error" in found
    wait_for(lambda: gone(ids), 60)


PARENT = "import sys; sys.path[:0] = [{tests!r}, {root!r}]; from gti_nb.processes import launch; " \
         "launch('test_processes:sleep', {{'folder': {folder!r}}}, processes={processes}, device='cpu')"


@pytest.mark.parametrize("processes, blow", [(2, signal.SIGKILL), (2, signal.SIGINT), (1, signal.SIGTERM)])
def test_no_orphans(tmp_path, processes, blow):
    "However the one who launched goes, what was launched goes too."
    code = PARENT.format(tests=str(ROOT / "tests"), root=str(ROOT), folder=str(tmp_path), processes=processes)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ids = everyone(tmp_path, processes)
    parent.send_signal(blow)
    _, said = parent.communicate(timeout=120)
    assert parent.returncode == -blow, said
    wait_for(lambda: gone(ids), 60)


# --- several nodes: this machine, taken for two -------------------------------------------------------------------------

@pytest.fixture
def pair():
    "Node 0 and node 1."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return [Node(rank, 2, "127.0.0.1", free.getsockname()[1]) for rank in range(2)]


@pytest.mark.parametrize("words, complaint", [
    ({"GTI_NODES": "two"}, "must be whole numbers"), ({"GTI_NODES": "2", "GTI_NODE_RANK": "2"}, "number the nodes from 0"),
    ({"GTI_NODE_RANK": "1"}, "GTI_NODES is 1"), ({"GTI_NODES": "2"}, "GTI_MAIN_ADDRESS isn't set")], ids=lambda value: str(value))
def test_a_wrong_environment_is_told(words, complaint, monkeypatch):
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=complaint):
        this_node()


@pytest.mark.parametrize("error", [None, UserError("the disk is full"), ZeroDivisionError("nothing to divide by"), KeyboardInterrupt()], ids=repr)
def test_the_others_end_as_node_0_does(error, pair):
    thread, found = in_thread(pair[1], function=follow)
    with contextlib.suppress(type(error)), gather(pair[0]):
        if error:
            raise error
    thread.join(30)
    assert found == ({"error": f"the run has ended: {str(error) or 'it was interrupted'}"} if error else {"value": None})


def test_nobody_waits_forever(pair, monkeypatch):
    monkeypatch.setattr(processes, "MEETING", 0.3)
    with pytest.raises(UserError, match="node 0 doesn't answer at 127.0.0.1:.* has it been started"):
        follow(pair[1])
    with pytest.raises(UserError, match="of 2 nodes, number 1 didn't come"), gather(pair[0]):
        pass
    monkeypatch.setattr(processes, "SILENCE", 0.3)
    monkeypatch.setattr(Board, "end", lambda board, how: None)
    board = Board(pair[0], keeps=True)
    with pytest.raises(UserError, match="the board can't be at 127.0.0.1:.* GTI_MAIN_PORT to a free port"):
        Board(pair[0], keeps=True)
    other = Board(pair[1])
    for _ in range(5):
        assert not other.is_over() and not board.trouble()
        time.sleep(0.1)
    time.sleep(0.4)
    assert board.trouble().startswith("node 1 has been silent for")


def test_a_process_killed_on_another_node_is_named(pair, tmp_path):
    thread, found = in_thread(pair[1], function=follow)
    with pytest.raises(UserError) as error, gather(pair[0]):
        Board(pair[0]).call("test_processes:fail_while_another_waits", {"folder": str(tmp_path), "how": "killed"}, **WORDS)
    thread.join(120)
    assert "node 1: process 1 of 2 was ended by SIGKILL: if nobody did that, memory ran out" in str(error.value)
    assert found == {"error": f"the run has ended: {error.value}"}
    assert gone(everyone(tmp_path))


NODE_0 = "import sys; sys.path[:0] = [{tests!r}, {root!r}]; from gti_nb.processes import *; node = Node(0, 2, '127.0.0.1', {port})\n" \
         "with gather(node): Board(node).call('test_processes:sleep', {{'folder': {folder!r}}}, 2, 'cpu')"


def test_when_node_0_is_killed_the_others_end(pair, tmp_path):
    thread, found = in_thread(pair[1], function=follow)
    code = NODE_0.format(tests=str(ROOT / "tests"), root=str(ROOT), folder=str(tmp_path), port=pair[0].port)
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ids = everyone(tmp_path)
    first.kill()
    first.wait()
    thread.join(60)
    assert found["error"].startswith("node 0 has gone, without a word")
    wait_for(lambda: gone(ids), 60)
