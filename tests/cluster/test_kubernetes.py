"""The manifest for Kubernetes, held against Kubeflow's own models: that needs no cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import commands

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("command", [["train", "--checkpoint-every", "5"], ["compare"], ["doctor"]])
def test_kubeflow_takes_the_manifest(command: list[str], tmp_path: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    words = ["--nodes", "2", "--ranks-per-node", "4", "--gpus-per-node", "4", "--image", "lab:1"]
    done = commands.here("submit", "--to", "kubernetes", *words, "--", *command, cwd=tmp_path)
    job = yaml.safe_load((tmp_path / done.stdout.strip()).read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.spec.trainer.num_nodes == 2
    assert read.to_dict() == job  # no field that the model does not know
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(job)
