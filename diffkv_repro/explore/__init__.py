"""Widgets over the library: each a plain function from choices to a figure, and a thin layer that asks for them."""
