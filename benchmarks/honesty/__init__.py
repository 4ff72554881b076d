"""How honest the predictions are: calibrated on some models, tested on others, failures kept."""
