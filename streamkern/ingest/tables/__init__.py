"""Tables as they are: words, dates and missing values into the features of one fitted encoder."""
