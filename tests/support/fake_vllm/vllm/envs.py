environment_variables = {"VLLM_NO_USAGE_STATS": None, "VLLM_USE_V2_MODEL_RUNNER": None}
