"""KVServe (SIGCOMM 2026): KV caches compressed for the network, with a profile chosen for each request.

The latency model says what a profile costs at a bandwidth, the controller chooses by it and learns from what it
observes, and the simulator replays traces through controllers to compare them.
"""
