"""What a model says of new rows: rows in, answers written, figures of how good they are."""

from streamkern.basics.room import name_the_function

name_the_function(__name__, "streamkern.load(run_dir).predict(X), or with out= to write to a file")
