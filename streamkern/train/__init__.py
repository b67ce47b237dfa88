"""Where data and mathematics meet: a run opened, set up, trained, resumed, and its model."""

from streamkern.basics.room import name_the_function

name_the_function(__name__, 'streamkern.train_model("run.toml"), or with a RunConfig')
