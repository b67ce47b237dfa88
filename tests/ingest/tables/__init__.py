"""Tests of the room `ingest.tables`."""
