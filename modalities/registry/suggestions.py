from modalities.config.suggestions import did_you_mean, nearest  # noqa: F401
