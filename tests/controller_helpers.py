"""Profiles, requests and a request served, for the tests of the controller."""

from diffkv_repro.kvserve.controller import ControllerSettings
from diffkv_repro.kvserve.latency import MeasuredProfile, ServiceContext, transfer_seconds

GREEDY = ControllerSettings(epsilon=0)
PROFILES = (
    MeasuredProfile.from_speed("2x", 2, 8e9, {"qa": 1.0, "code": 0.98}),
    MeasuredProfile.from_speed("4x", 4, 2e9, {"qa": 0.99, "code": 0.97}),
    MeasuredProfile.from_speed("8x", 8, 5e8, {"qa": 0.98, "code": 0.5}),
)


def request(bandwidth=1e8, raw_bytes=1e8, workload="qa", **more):
    return ServiceContext(workload, raw_bytes, bandwidth, **more)


def serve(controller, context, factor=lambda name: 1.0):
    """One request whose time is that of the model times a factor."""
    decision = controller.decide(context)
    controller.observe(decision, factor(decision.profile.name) * transfer_seconds(decision.profile, context))
    return decision
