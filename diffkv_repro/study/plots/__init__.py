"""The figures, one module a theme: data in, plotly figure out, nothing measured here."""
