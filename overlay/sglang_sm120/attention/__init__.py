"""The attention backend `sm120_mla`."""

BACKEND_NAME = "sm120_mla"
