"""What happens to a trained model's scores at inference: the memory's votes, the frequency dial, probabilities.

    dial.py         how much frequency counts
    memory.py       the nearest training queries vote with their labels
    calibration.py  from scores to probabilities, by label frequency; thresholds for a wanted precision
    scoring.py      the settings of both and the dial, as tuned on validation and stored with the model

Functions of arrays; how the settings are chosen is `dexter.tuning`.
"""
