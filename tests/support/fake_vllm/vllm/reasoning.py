class ReasoningParserManager:
    @staticmethod
    def list_registered():
        return ["openai_gptoss", "qwen3"]
