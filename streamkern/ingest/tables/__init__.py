"""Encode tables with words, dates and missing values as features, by one fitted encoder."""
