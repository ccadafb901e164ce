"""`shardlab submit`: scripts that their engine can read, and nothing written that would fail."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import commands
from shardlab.run import submit as submitting

TRAIN = ["--", "train", "--size", "tiny", "--steps", "4", "--checkpoint-every", "2"]
WORLD = ["--nodes", "2", "--ranks-per-node", "2", "--name", "gpt-a"]
EXTRA = {"kubernetes": ["--image", "hub/lab:1", "--gpus-per-node", "2"]}


def written(tmp_path: Path, engine: str, *more: str, train: list[str] = TRAIN) -> str:
    args = ["submit", "--to", engine, *WORLD, *EXTRA.get(engine, []), *more, *train]
    done = commands.here(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return (tmp_path / done.stdout.strip()).read_text()


@pytest.mark.parametrize("engine", ["slurm", "mpi", "torchrun"])
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_scripts_are_shell(engine: str, nodes: str, tmp_path: Path) -> None:
    odd = [*TRAIN, "--set", "model.options={'layers': 2}"]  # quotes and blanks stay one word
    text = written(tmp_path, engine, "--nodes", nodes, train=odd)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    joined = text.replace("\\\n", " ").splitlines()
    (line,) = (line for line in joined if "-m shardlab train" in line)
    words = shlex.split(line)
    assert words[words.index("--set") + 1] == "model.options={'layers': 2}"
    assert "auto" in words
    assert all(len(line) < 120 for line in text.splitlines())


def test_slurm(tmp_path: Path) -> None:
    flags = ["--time", "04:00:00", "--partition", "long", "--account", "me", "--gpus-per-node", "2"]
    text = written(tmp_path, "slurm", *flags, "--python", "/opt/python")
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    )
    assert asked == {
        "job-name": "gpt-a", "nodes": "2", "ntasks-per-node": "2", "gpus-per-node": "2",
        "time": "04:00:00", "partition": "long", "account": "me", "output": "gpt-a-%j.log",
        "open-mode": "append", "requeue": "", "signal": "TERM@120",
    }  # fmt: skip
    assert '--resume auto --out "runs/gpt-a-$SLURM_JOB_ID"' in text
    assert "/opt/python -m shardlab train" in text


def test_mpi_names_the_first_host(tmp_path: Path) -> None:
    text = written(tmp_path, "mpi", "--hosts", "n1,n2")
    (tmp_path / "mpirun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    done = commands.run("bash", "gpt-a.mpi.sh", cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    words = done.stdout.splitlines()
    assert words[:6] == ["-np", "4", "--map-by", "ppr:2:node", "--host", "n1:2,n2:2"]
    assert words[-1] == "launch.address=n1"
    assert text.startswith("#!/bin/bash\n# shardlab train on 2 nodes, 2 ranks on each, with Open")


def test_kubernetes(tmp_path: Path) -> None:
    job = yaml.safe_load(written(tmp_path, "kubernetes"))
    assert (job["kind"], job["apiVersion"]) == ("TrainJob", "trainer.kubeflow.org/v1alpha1")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["command"] == ["torchrun", "-m", "shardlab", "train"]
    assert trainer["args"] == [*TRAIN[2:], "--resume", "auto", "--out", "/runs/gpt-a"]


def test_ray(tmp_path: Path) -> None:
    tree = ast.parse(written(tmp_path, "ray"))
    assert commands_in(tree) == [
        *TRAIN[1:], "--resume", "auto", "--out", str(tmp_path / "runs" / "gpt-a")
    ]  # fmt: skip


def commands_in(tree: ast.Module) -> list[str]:
    found = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    return list(ast.literal_eval(found["COMMAND"]))


@pytest.mark.parametrize("engine", submitting.FILES)
def test_any_command_with_ranks(engine: str, tmp_path: Path) -> None:
    """Only a training run has checkpoints: nothing else is started again."""
    compare = ["--", "compare", "--strategies", "zero2,zero3", "--size", "tiny"]
    text = written(tmp_path, engine, train=compare)
    assert "zero2,zero3" in text
    assert "--resume" not in text
    assert "runs/gpt-a" in text
    assert "checkpoint" not in text
    assert not any(
        word in text for word in ("max-restarts=3", "max_failures=3", "scontrol requeue")
    )
    if engine in ("slurm", "mpi", "torchrun"):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_doctor_writes_nothing(tmp_path: Path) -> None:
    assert commands_in(ast.parse(written(tmp_path, "ray", train=["--", "doctor"]))) == ["doctor"]


@pytest.mark.parametrize("engine", ["ray", "kubernetes"])
@pytest.mark.parametrize("how", ["flag", "set", "file"])
def test_data_that_only_the_cluster_has(engine: str, how: str, tmp_path: Path) -> None:
    """All else is still checked here."""
    (tmp_path / "run.yaml").write_text("data: {source: /mnt/tokens}\n")
    given = {
        "flag": ["--data", "/mnt/tokens"],
        "set": ["--set", "data.source=/mnt/tokens"],
        "file": ["--config", "run.yaml"],
    }[how]
    args = ["submit", "--to", engine, *EXTRA.get(engine, []), *TRAIN, *given]
    done = commands.here(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "note: /mnt/tokens is not on this machine; the nodes must have it\n"
    assert given[-1] in (tmp_path / done.stdout.strip()).read_text()
    done = commands.here(*args, "--global-batch", "0", "--name", "b", cwd=tmp_path)
    assert done.returncode == 2


def test_data_that_is_here_needs_no_note(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {source: /mnt/tokens}\n")
    args = ["--config", "run.yaml", "--data", str(tmp_path)]
    done = commands.here("submit", "--to", "ray", *TRAIN, *args, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_rays_own_group_uses_the_interface(tmp_path: Path) -> None:
    text = written(tmp_path, "ray", train=[*TRAIN, "--set", "launch.interface=ib0"])
    assert '{"GLOO_SOCKET_IFNAME": "ib0"}' in text


def test_a_folder_that_was_named_stays(tmp_path: Path) -> None:
    text = written(tmp_path, "slurm", train=[*TRAIN, "--out", "/shared/a"])
    assert "--out /shared/a --resume auto" in text
    assert "--out " not in text.replace("--out /shared/a", "")


@pytest.mark.parametrize(("args", "words"), [
    (["--to", "slrum", *TRAIN], "unknown engine for --to 'slrum'; did you mean 'slurm'?"),
    (["--to", "slurm", "--", "compar"], "unknown command to submit 'compar'; did you mean 'comp"),
    (["--to", "slurm", "--", "compare", "--stpes", "4"], "No such option: --stpes"),
    (["--to", "slurm", "--", "compare", "--strategies", "zero1,zero9"], "unknown strategy 'zero9'"),
    (["--to", "slurm", "--", "network", "--set", "launch.prot=4"], "did you mean 'port'?"),
    (["--to", "slurm", "--", "train", "--stpes", "4"], "No such option: --stpes"),
    (["--to", "slurm", "--", "train", "--set", "training.stesp=4"], "did you mean 'steps'?"),
    (["--to", "slurm", "--", "train", "--strategy", "zero9"], "unknown strategy 'zero9'"),
    (["--to", "slurm", "--nodes", "3", *TRAIN], "a global batch of 8 cannot be divided evenly"),
    (["--to", "slurm", "--nodes", "2", *TRAIN, "--world", "4"], "--world 4 contradicts 2 nodes"),
    (["--to", "slurm", *TRAIN, "--max-restarts", "2"], "sbatch --requeue"),
    (["--to", "ray", *TRAIN, "--set", "launch.address=a"], "launch.address is for slurm and mpi"),
    (["--to", "slurm", "--image", "x", *TRAIN], "--image is for kubernetes"),
    (["--to", "mpi", "--time", "1:00:00", *TRAIN], "--time is for slurm"),
    (["--to", "slurm", "--time", "soon", *TRAIN], "--time 'soon' must be as sbatch takes it"),
    (["--to", "slurm", "--name", "a b", *TRAIN], "--name 'a b' must be small letters"),
    (["--to", "slurm", "--partition", "a b", *TRAIN], "--partition 'a b' must be one word"),
    (["--to", "slurm", "--nodes", "0", *TRAIN], "--nodes must be at least 1"),
    (["--to", "mpi", "--hosts", "a,b", *TRAIN], "--hosts names 2 hosts, not 1"),
    (["--to", "kubernetes", *TRAIN], "kubernetes needs an image with shardlab in it"),
    (["--to", "slurm", *TRAIN, "--data", "/no/such/tokens"], "no such data: /no/such/tokens"),
    (["--to", "slurm", "--file", "no/such/folder", *TRAIN], "cannot be written: No such file"),
    (["--to", "torchrun", "--nodes", "2", "--run", *TRAIN], "torchrun has no queue"),
    (["--to", "mpi", "--nodes", "2", "--run", *TRAIN], "mpirun needs to know the nodes"),
    (["--to", "kubernetes", "--image", "x", "--run", *TRAIN], "kubectl is not on this machine"),
])  # fmt: skip
def test_refused_and_nothing_written(args: list[str], words: str, tmp_path: Path) -> None:
    done = commands.here("submit", *args, cwd=tmp_path, PATH="/nowhere")
    assert done.returncode == 2
    assert words in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    written(tmp_path, "slurm")
    before = (tmp_path / "gpt-a.sbatch").read_text()
    done = commands.here("submit", "--to", "slurm", "--name", "gpt-a", *TRAIN, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: gpt-a.sbatch exists; choose another --name")
    assert (tmp_path / "gpt-a.sbatch").read_text() == before


def test_without_checkpoints_it_says_what_that_means(tmp_path: Path) -> None:
    done = commands.here("submit", "--to", "slurm", "--", "train", cwd=tmp_path)
    assert "without --checkpoint-every a run that is started again begins at" in done.stderr


@pytest.mark.parametrize(("engine", "program", "words"), [
    ("slurm", "sbatch", "gpt-a.sbatch"),
    ("kubernetes", "kubectl", "create -f gpt-a.trainjob.yaml"),
    ("ray", "ray", "job submit --working-dir . -- python gpt-a.ray.py"),
])  # fmt: skip
def test_run_gives_the_file_to_the_engine(
    engine: str, program: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / program).write_text(f'#!/bin/bash\necho "$*" > {tmp_path}/asked; exit 3\n')
    (tmp_path / program).chmod(0o755)
    args = ["submit", "--to", engine, *WORLD, *EXTRA.get(engine, []), "--run", *TRAIN]
    done = commands.here(*args, cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 3  # the engine's
    assert (tmp_path / "asked").read_text().strip() == words


@pytest.mark.long
def test_the_torchrun_script_runs(tmp_path: Path) -> None:
    args = ["--ranks-per-node", "2", "--name", "one", "--run", *TRAIN, "--data", "synthetic"]
    done = commands.shardlab("submit", "--to", "torchrun", *args, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "one" / "checkpoints" / "step-000004").is_dir()
    assert sys.executable in (tmp_path / "one.torchrun.sh").read_text()


PAGES = {
    page.stem: commands.bash_lines(f"docs/clusters/{page.name}")
    for page in (commands.ROOT / "docs" / "clusters").glob("*.md")
}
SUBMITS = [line for lines in PAGES.values() for line in lines if line.startswith("shardlab submit")]


@pytest.mark.parametrize("line", SUBMITS)
def test_the_pages_show_commands_that_work(line: str, tmp_path: Path) -> None:
    done = commands.here(*shlex.split(line)[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / done.stdout.strip()).is_file()


def test_each_engine_has_a_page_whose_commands_are_run() -> None:
    """The others are run by tests/cluster/test_launchers.py."""
    assert PAGES.keys() == submitting.FILES.keys()
    for engine, lines in PAGES.items():
        submits = [line for line in lines if line in SUBMITS]
        assert all(f"--to {engine} " in line for line in submits)
        assert any(" -- train " in line for line in submits)
        launcher = {"slurm": "srun ", "mpi": "mpirun ", "torchrun": "torchrun "}.get(engine)
        rest = [line for line in lines if line not in SUBMITS]
        assert all(launcher is not None and line.startswith(launcher) for line in rest)
        shown = " ".join(lines)
        assert all(word in shown for word in ("shardlab doctor", "shardlab network") if launcher)
        assert all(f" {word}" in shown for word in ("doctor", "network", "train", "compare"))
    assert commands.bash_lines("docs/clusters.md") == []
