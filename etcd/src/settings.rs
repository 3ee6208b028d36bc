//! Where etcd answers.

use crate::keys::Keys;

/// Checked settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// Client URLs of its members, at least one.
    pub endpoints: Vec<String>,
    /// What the cluster's keys begin with; no slash at its end.
    pub prefix: String,
}

impl EtcdSettings {
    /// Accepts the settings or says what is wrong with them. An endpoint without a scheme is `http`.
    ///
    /// # Errors
    /// The value that is wrong, in words.
    pub fn new(endpoints: &[String], prefix: &str) -> Result<Self, String> {
        let with_scheme = |endpoint: &String| match endpoint.split_once("://") {
            None => Ok(format!("http://{endpoint}")),
            Some(("http", _)) => Ok(endpoint.clone()),
            Some((scheme, _)) => Err(format!("{endpoint:?} begins with {scheme}://, only http:// is known")),
        };
        let endpoints = endpoints.iter().filter(|endpoint| !endpoint.is_empty()).map(with_scheme);
        let endpoints = endpoints.collect::<Result<Vec<_>, _>>()?;
        if endpoints.is_empty() {
            return Err("no endpoint is given".to_owned());
        }
        let is_clean = !prefix.chars().any(|letter| letter.is_control() || letter.is_whitespace());
        if !prefix.starts_with('/') || prefix.len() < 2 || prefix.ends_with('/') || !is_clean {
            return Err(format!("prefix {prefix:?} is not of the form /name"));
        }
        Ok(Self { endpoints, prefix: prefix.to_owned() })
    }

    /// The keys of the cluster.
    pub fn keys(&self) -> Keys {
        Keys::new(&self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_be_meant() {
        let settings = |endpoint: &str, prefix: &str| EtcdSettings::new(&[endpoint.to_owned()], prefix);
        assert_eq!(settings("a:2379", "/lockstep").unwrap().endpoints, ["http://a:2379"]);
        assert!(settings("https://a:2379", "/lockstep").unwrap_err().contains("https"));
        assert!(settings("", "/lockstep").unwrap_err().contains("no endpoint"));
        for prefix in ["", "/", "lockstep", "/lockstep/", "/lock step"] {
            assert!(settings("a:2379", prefix).unwrap_err().contains("prefix"), "{prefix}");
        }
    }
}
