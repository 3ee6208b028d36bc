//! The tenants' file: TOML, one `[[tenant]]` each.
//! Invariant: what passes here is complete and in range; unknown keys, names that are there twice and keys that two
//! tenants share are refused, each by name; what is wrong is said without the line itself, in which a key may stand.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Deserializer, de::Error};

use super::key::KeyHash;

/// Largest weight, as workers check it.
const MAX_WEIGHT: u32 = 1000;
/// Longest name, bytes.
const MAX_NAME_BYTES: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<TenantSpec>,
}

/// What the file says of a tenant.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct TenantSpec {
    /// Letters, digits, `.`, `_` and `-`: it is a label of metrics.
    pub name: String,
    /// SHA-256 of its keys; several while one is being replaced.
    #[serde(default, deserialize_with = "hashes")]
    pub key_sha256: Vec<KeyHash>,
    /// Its part of the replicas beside others, 1 to 1000.
    #[serde(default = "one")]
    pub weight: u32,
    /// Most of its requests at once.
    pub max_concurrent: Option<usize>,
    /// Most tokens that it uses in a minute, prompts and outputs.
    pub tokens_per_minute: Option<u64>,
    /// Tokens that it may use in all, or in each period.
    pub token_budget: Option<u64>,
    /// Hours after which the budget is there again.
    pub budget_period_hours: Option<u64>,
    /// It may call Admin.
    #[serde(default)]
    pub admin: bool,
    /// Its prompts are cached for itself alone.
    #[serde(default)]
    pub isolated: bool,
}

fn one() -> u32 {
    1
}

/// Its own errors would quote what they refuse.
fn hashes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<KeyHash>, D::Error> {
    let problem = |_| D::Error::custom("key_sha256 is no array of SHA-256, each of 64 hexadecimal digits");
    Vec::deserialize(deserializer).map_err(problem)
}

impl TenantSpec {
    /// Without keys and limits.
    pub fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            key_sha256: Vec::new(),
            weight: 1,
            max_concurrent: None,
            tokens_per_minute: None,
            token_budget: None,
            budget_period_hours: None,
            admin: true,
            isolated: false,
        }
    }

    /// Time after which the budget is there again.
    pub fn budget_period(&self) -> Option<Duration> {
        self.budget_period_hours.map(|hours| Duration::from_secs(hours * 3600))
    }

    fn check(&self) -> Result<(), String> {
        let Self { name, weight, .. } = self;
        check_name(name)?;
        let wrong = |field: &str, value: &dyn std::fmt::Display, allowed: &str| {
            Err(format!("tenant {name}: {field} is {value}, allowed {allowed}"))
        };
        if !(1..=MAX_WEIGHT).contains(weight) {
            return wrong("weight", weight, &format!("are 1 to {MAX_WEIGHT}"));
        }
        if self.max_concurrent == Some(0) {
            return wrong("max_concurrent", &0, "is 1 and above");
        }
        if self.tokens_per_minute == Some(0) {
            return wrong("tokens_per_minute", &0, "is 1 and above");
        }
        match self.budget_period_hours {
            Some(hours) if self.token_budget.is_none() || !(1..=87_600).contains(&hours) => {
                wrong("budget_period_hours", &hours, "are 1 to 87600 beside a token_budget")
            }
            _ => Ok(()),
        }
    }
}

/// Checks a tenant's name.
///
/// # Errors
/// What is wrong with it.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_plain) {
        return Err(format!("name is {name:?}, allowed are 1 to {MAX_NAME_BYTES} letters, digits and the signs . _ -"));
    }
    Ok(())
}

/// Reads the file's text.
///
/// # Errors
/// What is wrong, with the line or the tenant.
pub fn parse(text: &str) -> Result<Vec<TenantSpec>, String> {
    let File { tenant: tenants } = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.matches('\n').count() + 1, error.message())
    })?;
    let (mut names, mut keys) = (BTreeSet::new(), BTreeSet::new());
    for tenant in &tenants {
        tenant.check()?;
        let name = &tenant.name;
        if !names.insert(name) {
            return Err(format!("tenant {name} is there twice"));
        }
        if let Some(key) = tenant.key_sha256.iter().find(|key| !keys.insert(**key)) {
            return Err(format!("tenant {name}: key_sha256 {key} is there twice"));
        }
    }
    Ok(tenants)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_with_its_defaults() {
        let hash = KeyHash::of(b"k");
        let text = format!(
            "[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{hash}\"]\nweight = 3\nmax_concurrent = 2\ntokens_per_minute = 600\n\
             token_budget = 1_000\nbudget_period_hours = 24\nadmin = true\nisolated = true\n[[tenant]]\nname = \"b\""
        );
        let tenants = parse(&text).unwrap();
        assert_eq!(tenants[0].budget_period(), Some(Duration::from_secs(86_400)));
        assert_eq!((tenants[0].weight, tenants[0].key_sha256[0], tenants[0].isolated), (3, hash, true));
        let plain = TenantSpec { admin: false, ..TenantSpec::named("b") };
        assert_eq!(tenants[1], plain);
        assert!(parse("").unwrap().is_empty());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let hash = KeyHash::of(b"k");
        let cases = [
            ("[[tenant]]\nname = \"a b\"", "name is \"a b\""),
            ("[[tenant]]\nname = \"a\"\nwieght = 2", "wieght"),
            ("[[tenant]]\nname = \"a\"\nweight = 0", "tenant a: weight is 0, allowed are 1 to 1000"),
            ("[[tenant]]\nname = \"a\"\nmax_concurrent = 0", "max_concurrent is 0"),
            ("[[tenant]]\nname = \"a\"\ntokens_per_minute = 0", "tokens_per_minute is 0"),
            ("[[tenant]]\nname = \"a\"\nbudget_period_hours = 2", "budget_period_hours is 2"),
            ("[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"a\"", "tenant a is there twice"),
            ("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"xy\"]", "key_sha256 is no array of SHA-256"),
            ("[[tenant]]\nname = \"a\"\n\nweight = true", "line 4: "),
            ("[[tenants]]\nname = \"a\"", "tenants"),
        ];
        for (text, expected) in cases {
            let problem = parse(text).unwrap_err();
            assert!(problem.contains(expected), "{problem}");
        }
        let key = super::super::key::generate().unwrap();
        for value in [format!("[\"{key}\"]"), format!("\"{key}\""), format!("[\"{key}\""), key.clone()] {
            let problem = parse(&format!("[[tenant]]\nname = \"a\"\nkey_sha256 = {value}\n")).unwrap_err();
            assert!(problem.starts_with("line ") && !problem.contains(&key[9..20]), "{problem}");
        }
        let twice = format!("[[tenant]]\nname = \"a\"\nkey_sha256 = [\"{hash}\"]\n");
        let problem = parse(&format!("{twice}{}", twice.replace("\"a\"", "\"b\""))).unwrap_err();
        assert!(problem.contains("tenant b: key_sha256"), "{problem}");
    }
}
