"""Ground floor shared by both papers: nothing here imports another part of the package."""
