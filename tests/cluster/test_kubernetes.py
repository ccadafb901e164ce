"""The manifest for Kubernetes, held against Kubeflow's own models: that needs no cluster."""

from __future__ import annotations

import pytest
import yaml

import commands

pytestmark = pytest.mark.cluster


def test_kubeflow_takes_the_manifest() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    job = yaml.safe_load((commands.CLUSTERS / "kubernetes.yaml").read_text())
    read = models.TrainerV1alpha1TrainJob.from_dict(job)
    assert read.spec.trainer.num_nodes == 2
    assert read.to_dict() == job  # no field that the model does not know
    job["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(job)
