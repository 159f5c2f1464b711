//! Writes the pickles that snapshots need: protocol 4, repeated strings as references to the memo.

use std::collections::HashMap;

#[derive(Debug, Clone)]
pub enum Value {
    Nothing,
    Bool(bool),
    Int(i64),
    Text(String),
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Value::Int(value)
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Value::Int(value as i64)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Value::Bool(value)
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Value::Text(value.into())
    }
}

impl From<Vec<Value>> for Value {
    fn from(value: Vec<Value>) -> Self {
        Value::List(value)
    }
}

pub fn dict<const N: usize>(pairs: [(&str, Value); N]) -> Value {
    Value::Dict(pairs.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

/// Adds or replaces a key.
pub fn with(value: Value, key: &str, new: impl Into<Value>) -> Value {
    let Value::Dict(mut pairs) = value else { panic!("a dict") };
    pairs.retain(|(old, _)| !matches!(old, Value::Text(text) if text == key));
    pairs.push((key.into(), new.into()));
    Value::Dict(pairs)
}

#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    memo: HashMap<String, u32>,
    next: u32,
}

impl Writer {
    fn memoize(&mut self) -> u32 {
        self.bytes.push(0x94);
        self.next += 1;
        self.next - 1
    }

    fn items(&mut self, items: &[Value], end: u8) {
        for batch in items.chunks(1000) {
            self.bytes.push(b'(');
            batch.iter().for_each(|item| self.write(item));
            self.bytes.push(end);
        }
    }

    fn write(&mut self, value: &Value) {
        match value {
            Value::Nothing => self.bytes.push(b'N'),
            Value::Bool(value) => self.bytes.push(if *value { 0x88 } else { 0x89 }),
            Value::Int(value) => {
                self.bytes.extend([0x8a, 8]);
                self.bytes.extend(value.to_le_bytes());
            }
            Value::Text(text) => {
                if let Some(place) = self.memo.get(text) {
                    self.bytes.push(b'j');
                    self.bytes.extend(place.to_le_bytes());
                    return;
                }
                self.bytes.push(b'X');
                self.bytes.extend((text.len() as u32).to_le_bytes());
                self.bytes.extend(text.bytes());
                let place = self.memoize();
                self.memo.insert(text.clone(), place);
            }
            Value::List(items) => {
                self.bytes.push(b']');
                self.memoize();
                self.items(items, b'e');
            }
            Value::Tuple(items) => {
                self.bytes.push(b'(');
                items.iter().for_each(|item| self.write(item));
                self.bytes.push(b't');
            }
            Value::Dict(pairs) => {
                self.bytes.push(b'}');
                self.memoize();
                let flat: Vec<Value> =
                    pairs.iter().flat_map(|(key, value)| [key.clone(), value.clone()]).collect();
                self.items(&flat, b'u');
            }
        }
    }
}

pub fn pickle(value: &Value) -> Vec<u8> {
    let mut writer = Writer { bytes: vec![0x80, 4], ..Writer::default() };
    writer.write(value);
    writer.bytes.push(b'.');
    writer.bytes
}
