//! The traces in the repository (`traces/README.md`), by name.

macro_rules! traces {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../traces/", $name, ".csv.gz")))),+]
    };
}

const TRACES: &[(&str, &[u8])] = traces![
    "bert_base_infer_b1_s128",
    "bert_base_train_b32_s128",
    "bert_base_train_b32_s384",
    "bert_large_infer_b1_s128",
    "gpt2_12l_train_b8_s1024",
    "gpt2_large_train_b4_s512",
    "llama7b_decode_b1",
    "resnet50_infer_b1",
    "resnet50_infer_b1_graph",
    "resnet50_train_b128",
    "resnet50_train_b64",
    "whisper_small_train_b16",
];

pub fn names() -> impl Iterator<Item = &'static str> {
    TRACES.iter().map(|(name, _)| *name)
}

pub(crate) fn bytes(name: &str) -> Option<&'static [u8]> {
    TRACES.iter().find(|(known, _)| *known == name).map(|(_, bytes)| *bytes)
}
