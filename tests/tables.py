"""Make a table with many irregularities, as a CSV file, a Parquet file and a data frame."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd

TARGET, ID = "price, in €", "id"
CITIES = ["Rome", "New York, NY", 'the "Hague"', "São Paulo", "北京"]
MISSING = ["", "NA", "null", " ", "?"]  # "?" is none unless that is said


def troubled(n: int, seed: int = 0) -> pd.DataFrame:
    """Return rows whose target depends on text, numbers, dates and missing values."""
    rng = np.random.default_rng(seed)
    city, shop = rng.integers(0, len(CITIES), n), rng.integers(0, 80, n)
    age, day = rng.integers(18, 90, n).astype(float), rng.integers(0, 1000, n)
    member, size = rng.random(n) < 0.4, rng.lognormal(0, 1, n)
    frame = pd.DataFrame(
        {
            ID: np.arange(n),
            "City": [CITIES[k] for k in city],
            "shop": [f"shop {k}" for k in shop],
            "age (years)": age,
            "since": pd.Timestamp("2021-03-01") + pd.to_timedelta(day, "D"),
            "member": member,
            "size": size,
            "constant": 1.5,
            "nothing": None,
        }
    )
    for name, share in (("City", 0.1), ("age (years)", 0.15), ("since", 0.05)):
        frame.loc[rng.random(n) < share, name] = None
    noise = 0.1 * rng.normal(size=n)
    frame[TARGET] = city + (shop * 37 % 11) / 5 + age / 40 + member + np.sin(day / 58) + noise
    return frame


def write_csv(frame: pd.DataFrame, path: Path, seed: int = 0) -> None:
    """Write a CSV as other programs do: a byte order mark, CR LF, blank lines, blanks around cells,
    quotes, and several markers of missing values."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, lineterminator="\r\n")
        writer.writerow(frame.columns)
        for k, row in enumerate(frame.itertuples(index=False)):
            if k % 97 == 5:
                file.write("\r\n")
            cells = []
            for cell in row:
                if cell is None or cell is pd.NaT or cell != cell:
                    cells.append(MISSING[rng.integers(0, 4)])
                elif isinstance(cell, pd.Timestamp):
                    cells.append(cell.strftime("%Y-%m-%d"))
                else:
                    cells.append(f" {cell}" if isinstance(cell, float) and k % 5 == 0 else cell)
            writer.writerow(cells)
