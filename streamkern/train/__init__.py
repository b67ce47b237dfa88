"""Where data and mathematics meet: a run opened, set up, trained, resumed, and its model."""
