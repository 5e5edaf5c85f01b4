"""Tests of engine/api."""
