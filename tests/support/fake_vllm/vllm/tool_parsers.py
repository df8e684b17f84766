class ToolParserManager:
    @staticmethod
    def list_registered():
        return ["hermes", "openai", "qwen3_coder"]
