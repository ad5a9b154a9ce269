"""Measurements of the engine: parts of a step, steady states and arrivals, in real or virtual time; a cost model."""
