"""Serve a saved model by HTTP: `MODEL=digits-model uvicorn serve_fastapi:app --port 8000`.

The body of POST /predict is {"rows": [[0.0, 1.5, ...], ...]}; the answer {"predictions": [...]}.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import streamkern

MOST_ROWS = 10_000
model = streamkern.load(os.environ["MODEL"]).set_params(device="cpu", threads=1)
model.predict(np.zeros((1, model.n_features_in_)))  # the first call is the slowest
app = FastAPI()


class Request(BaseModel):
    """Rows of numbers, with the features in the order of training."""

    rows: list[list[float]]


@app.post("/predict")
def predict(request: Request) -> dict[str, Any]:
    """Return a prediction for each row; 422 with a sentence for rows that do not fit the model."""
    if not 1 <= len(request.rows) <= MOST_ROWS:
        raise HTTPException(422, f"{len(request.rows)} rows; send 1 to {MOST_ROWS}")
    try:
        return {"predictions": model.predict(request.rows).tolist()}
    except ValueError as error:  # streamkern's errors on wrong rows are among them
        raise HTTPException(422, str(error)) from None
