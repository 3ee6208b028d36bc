//! Who may use this coordinator, and how much.
//!
//! - [`mod@file`]: the tenants' file. [`key`]: API keys and their hashes.
//! - [`tenant`]: one tenant's limits and what it uses of them. [`bucket`], [`budget`]: tokens by the minute and in all.
//! - [`reload`]: the file again, when it changes. [`elsewhere`]: what tenants use through other coordinators.
//!
//! Invariants: without a file everything is the tenant [`DEFAULT`] and open; with one nothing is served without a key that
//! it lists, and keys are compared in constant time by their hashes alone. A request is admitted by what is known here: what
//! others have said of themselves is part of that.
//! Not here: fairness between those who were admitted (the engine, where the sequences of all coordinators meet).

pub mod bucket;
pub mod budget;
pub mod elsewhere;
pub mod file;
pub mod key;
pub mod reload;
pub mod tenant;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
};

use lockstep_proto::v1;
use subtle::{ConditionallySelectable, ConstantTimeEq};

pub use self::tenant::{Entry, Tenant};
use self::{file::TenantSpec, key::KeyHash};
use crate::{CoordinatorError, error::RequestError};

/// The tenant of everything where there is no file.
pub const DEFAULT: &str = "default";

/// The tenants; cheap to clone.
#[derive(Clone)]
pub struct Tenants {
    table: Arc<RwLock<Arc<Table>>>,
    is_file_valid: Arc<AtomicBool>,
}

struct Table {
    tenants: BTreeMap<String, Arc<Tenant>>,
    /// Every key of every tenant.
    keys: Vec<(KeyHash, Arc<Tenant>)>,
    /// Who comes without a key.
    open: Option<Arc<Tenant>>,
}

impl Tenants {
    /// Reads the tenants' file, if there is one.
    ///
    /// # Errors
    /// [`CoordinatorError::TenantsFile`] naming the file and what is wrong with it.
    pub fn open(file: Option<&Path>) -> Result<Self, CoordinatorError> {
        let table = match file {
            Some(path) => {
                let refused = |problem| CoordinatorError::TenantsFile { path: path.to_owned(), problem };
                let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
                Table::of(file::parse(&text).map_err(refused)?, &BTreeMap::new())
            }
            None => {
                let open = Arc::new(Tenant::new(TenantSpec::named(DEFAULT)));
                let tenants = [(DEFAULT.to_owned(), Arc::clone(&open))].into();
                Table { tenants, keys: Vec::new(), open: Some(open) }
            }
        };
        Ok(Self::with(table))
    }

    fn with(table: Table) -> Self {
        Self { table: Arc::new(RwLock::new(Arc::new(table))), is_file_valid: Arc::new(AtomicBool::new(true)) }
    }

    /// Whose request it is, by the value of its `authorization`.
    ///
    /// # Errors
    /// [`RequestError::NoKey`] or [`RequestError::UnknownKey`].
    pub fn authenticate(&self, authorization: Option<&[u8]>) -> Result<Arc<Tenant>, RequestError> {
        let table = self.table();
        if let Some(open) = &table.open {
            return Ok(Arc::clone(open));
        }
        let key = authorization.and_then(key::of_bearer).ok_or(RequestError::NoKey)?;
        let presented = KeyHash::of(key);
        // Every hash is looked at, whether one before it was the right one or not.
        let index = (0..).zip(&table.keys).fold(u64::MAX, |found, (index, (hash, _))| {
            u64::conditional_select(&found, &index, hash.0.ct_eq(&presented.0))
        });
        let found = usize::try_from(index).ok().and_then(|index| table.keys.get(index));
        found.map(|(_, tenant)| Arc::clone(tenant)).ok_or(RequestError::UnknownKey)
    }

    /// Whether requests need no key.
    pub fn is_open(&self) -> bool {
        self.table().open.is_some()
    }

    /// Whether the file, as it is now, is in force.
    pub fn is_file_valid(&self) -> bool {
        self.is_file_valid.load(Ordering::Relaxed)
    }

    /// Every tenant.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        self.table().tenants.values().cloned().collect()
    }

    /// A tenant's part of `total` things by weight: one at least.
    pub fn share(&self, tenant: &Tenant, total: usize) -> usize {
        let weights: usize = self.table().tenants.values().map(|tenant| tenant.weight() as usize).sum();
        (total.saturating_mul(tenant.weight() as usize) / weights.max(1)).max(1)
    }

    /// What this coordinator has said of its tenants' budgets, and another one counts from now on.
    pub fn hand_over(&self, said: &v1::BudgetUse) {
        let table = self.table();
        for spent in &said.tenants {
            if let Some(tenant) = table.tenants.get(&spent.tenant) {
                tenant.hand_over(spent);
            }
        }
    }

    /// Puts other tenants in force; those that stay keep what they used.
    fn replace(&self, specs: Vec<TenantSpec>) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        *table = Arc::new(Table::of(specs, &table.tenants));
    }

    fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Table {
    fn of(specs: Vec<TenantSpec>, present: &BTreeMap<String, Arc<Tenant>>) -> Self {
        let mut table = Self { tenants: BTreeMap::new(), keys: Vec::new(), open: None };
        for spec in specs {
            let (name, hashes) = (spec.name.clone(), spec.key_sha256.clone());
            let tenant = match present.get(&name) {
                Some(tenant) => {
                    tenant.change(spec);
                    Arc::clone(tenant)
                }
                None => Arc::new(Tenant::new(spec)),
            };
            table.keys.extend(hashes.into_iter().map(|hash| (hash, Arc::clone(&tenant))));
            table.tenants.insert(name, tenant);
        }
        table
    }
}

#[cfg(test)]
mod tests;
