"""The commands of this library; each has --help:

python -m course_lib.train      trains a language model, or only compiles its step (--dry-run)
python -m course_lib.sample     continues a text with the model of a run
python -m course_lib.evaluate   says how well a run predicts a text
python -m course_lib.export     writes the model of a run for Hugging Face's transformers
python -m course_lib.measure    measures a train step of your own on an absent GPU
"""

if __name__ == "__main__":
    print(__doc__.strip())
