"""scikit-learn's interface."""
