//! What settings may be: ranges that stand with the settings' types (`#[schemars(range(...))]`), for the check of a
//! configuration and for its reference, so that the two cannot differ.
#![forbid(unsafe_code)]

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// The schema of a configuration: for each setting its type, its range and its doc comment. Without references.
pub fn schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let generator = settings.with(|settings| settings.inline_subschemas = true).into_generator();
    generator.into_root_schema_for::<T>().to_value()
}

/// A number, or the length of a list, that is not within its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfRange {
    /// With the tables that it is in: `engine.window_us`.
    pub name: String,
    pub value: u64,
    pub least: u64,
    pub most: u64,
}

impl fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutOfRange { name, value, least, most } = self;
        match *most {
            u64::MAX => write!(f, "{name} is {value}: expected at least {least}"),
            most => write!(f, "{name} is {value}: expected {least} to {most}"),
        }
    }
}

impl std::error::Error for OutOfRange {}

/// Check every number and every list of a configuration.
///
/// # Errors
/// The first that is out of its range.
pub fn check<T: JsonSchema + Serialize>(config: &T) -> Result<(), OutOfRange> {
    // Not a number: what JSON cannot say is in no range.
    let value = serde_json::to_value(config).unwrap_or_default();
    within("", &schema::<T>(), &value)
}

fn within(name: &str, schema: &Value, value: &Value) -> Result<(), OutOfRange> {
    let bound = |key: &str| schema[key].as_u64();
    let check = |name: String, value: u64, least: Option<u64>, most: Option<u64>| {
        let (least, most) = (least.unwrap_or(0), most.unwrap_or(u64::MAX));
        match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(OutOfRange { name, value, least, most }),
        }
    };
    match value {
        Value::Object(settings) => settings.iter().try_for_each(|(key, value)| {
            let dot = if name.is_empty() { "" } else { "." };
            within(&format!("{name}{dot}{key}"), &schema["properties"][key], value)
        }),
        Value::Array(entries) => {
            let (least, most) = (bound("minItems"), bound("maxItems"));
            check(format!("the length of {name}"), entries.len() as u64, least, most)?;
            entries.iter().try_for_each(|entry| within(name, &schema["items"], entry))
        }
        Value::Number(number) => {
            let value = number.as_u64().unwrap_or(0);
            check(name.to_owned(), value, bound("minimum"), bound("maximum"))
        }
        Value::Null | Value::Bool(_) | Value::String(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = 9;

    #[derive(Clone, Default, JsonSchema, Serialize)]
    struct Inner {
        #[schemars(range(min = 1, max = MOST))]
        number: Option<u64>,
        #[schemars(length(max = 2), inner(range(min = 5)))]
        list: Vec<u32>,
    }

    #[derive(Clone, Default, JsonSchema, Serialize)]
    struct Outer {
        /// How the table `inner` is set.
        inner: Inner,
        free: u64,
    }

    fn checked(number: Option<u64>, list: &[u32]) -> Result<(), String> {
        let inner = Inner { number, list: list.into() };
        check(&Outer { inner, free: u64::MAX }).map_err(|error| error.to_string())
    }

    #[test]
    fn numbers_and_lists_are_kept_in_their_ranges() {
        for (number, list) in [(None, &[][..]), (Some(1), &[5]), (Some(9), &[5, u32::MAX])] {
            assert_eq!(checked(number, list), Ok(()));
        }
        let wrong = |number, list: &[u32]| checked(number, list).unwrap_err();
        assert_eq!(wrong(Some(0), &[]), "inner.number is 0: expected 1 to 9");
        assert_eq!(wrong(Some(10), &[]), "inner.number is 10: expected 1 to 9");
        assert_eq!(wrong(None, &[5, 5, 5]), "the length of inner.list is 3: expected 0 to 2");
        assert!(
            wrong(None, &[4]).starts_with("inner.list is 4: expected "),
            "{}",
            wrong(None, &[4])
        );
    }

    #[test]
    fn a_schema_has_no_references() {
        let schema = schema::<Outer>();
        assert_eq!(schema["properties"]["inner"]["properties"]["number"]["maximum"], 9);
        assert_eq!(schema["properties"]["inner"]["description"], "How the table `inner` is set.");
        assert!(!schema.to_string().contains("$ref"), "{schema}");
    }
}
