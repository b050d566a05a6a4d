"""Domains: the kinds of code that autotune can tune, one package each."""
