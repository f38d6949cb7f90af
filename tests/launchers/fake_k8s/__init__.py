"""A Kubernetes API server over real HTTP, whose pods are processes of this machine."""

from fake_k8s.server import FakeKubernetes

__all__ = ["FakeKubernetes"]
