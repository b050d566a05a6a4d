"""Choosing a strategy without a search, by tables that a calibration measures."""
